"""`ft-ckpt doctor PLACE`: the operations that a folder or bucket supports, fallbacks for the others, and its speed."""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from ft_ckpt.cli import views
from ft_ckpt.cli.options import add_json, print_lines
from ft_ckpt.config import human_size, parse_size
from ft_ckpt.errors import CheckpointError, TargetError
from ft_ckpt.storage.local_store import LocalStore
from ft_ckpt.storage.mounts import MountedFrom, mount_of
from ft_ckpt.storage.place import open_place
from ft_ckpt.storage.trials import (
    BUCKET_NEEDS,
    FOLDER_NEEDS,
    Ability,
    StoreSpeed,
    measure_speed,
    try_place,
)

_INSTEAD = {  # the fallback, or the effect, where an ability is missing
    "rename a folder": "files are moved into place one by one, the manifest last",
    "exchange two folders": "an overwritten checkpoint is put aside file by file; a crash is undone by the next save",
    "hard links": "files that do not change are written anew with each checkpoint",
    "symbolic links": "nothing is lost: none are made there",
    "sync of files": "a power cut may take the newest checkpoint; digests notice it",
    "sync of folders": "a power cut may take the newest checkpoint; digests notice it",
    "writing in place": "give each run of several ranks another place: they write into one file",
    "writing past the page cache": "all goes through the page cache, slower on most disks",
    "locks": "a dead process is recognised by time alone: leases last ten minutes, leftovers a day",
    "mapping": "files are read instead of mapped",
    "names in upper and lower case": "no two files may differ in nothing else",
    "noticing what was written over": "versions are compared on reading",
    "copies by the service": "files that do not change are sent anew with each checkpoint",
    "the clock": "times are taken from the store alone",
}


@dataclass(frozen=True)
class PlaceReport:
    """The result of examining a place."""

    place: str
    mount: MountedFrom | None  # None for a bucket
    free_bytes: int | None
    abilities: tuple[Ability, ...]
    speed: StoreSpeed | None  # None where it could not be measured

    @property
    def dangers(self) -> tuple[str, ...]:
        """The reasons why saves are not safe there."""
        needed = FOLDER_NEEDS | (BUCKET_NEEDS if self.mount is None else set())
        found = [f"{each.name}: {each.detail}" for each in self.abilities if not each.works and each.name in needed]
        return (*((self.mount.warning,) if self.mount is not None and self.mount.is_bucket else ()), *found)


def add_doctor(parser: ArgumentParser) -> None:
    parser.add_argument("place", metavar="PLACE", help="Folder, or URL of a bucket.")
    parser.add_argument("--size", default="64MB", help="Bytes to write and read to measure the speed (default: 64MB).")
    add_json(parser)
    parser.set_defaults(run=_doctor)


def _doctor(options: Namespace) -> int:
    """Test whether the folder or bucket PLACE supports all operations that saves need, and measure its speed. The exit
    code is 1 if saves are not safe there. The test files have hidden names and are deleted.
    """
    report = examine_place(options.place, parse_size(options.size))
    if options.as_json:
        views.print_json({**vars(report), "dangers": report.dangers, "safe": not report.dangers})
    else:
        _show_place(report)
    return 1 if report.dangers else 0


def examine_place(location: str, size_bytes: int) -> PlaceReport:
    """Test a folder or bucket. Raises TargetError if there is no such folder, or nothing can be written there."""
    place = open_place(location)
    store = place.folder
    if isinstance(store, LocalStore) and not place.is_folder:
        problem = "a file, expected a folder" if place.is_object else "no such folder; make it first"
        raise TargetError(f"{place}: {problem}")
    mount = mount_of(store.folder) if isinstance(store, LocalStore) else None
    abilities, speed = try_place(store), None
    with suppress(CheckpointError):  # the abilities say why
        speed = measure_speed(store, size_bytes)
    return PlaceReport(str(place), mount, store.free_bytes(), abilities, speed)


def _show_place(report: PlaceReport) -> None:
    print_lines(*_place_facts(report))
    rows = []
    for each in report.abilities:
        instead = f"{each.detail}; {_INSTEAD.get(each.name, '')}".rstrip("; ")
        rows.append((each.name, "yes", "") if each.works else (each.name, "no", instead))
    views.print_table(("", "works", "else"), rows)
    print_lines(*([f"not safe: {each}" for each in report.dangers] or ["saves are safe here"]))


def _place_facts(report: PlaceReport) -> Iterator[str]:
    speed = report.speed
    if report.mount is not None:
        yield f"{report.place}: {report.mount.kind}, {report.mount.source} at {report.mount.point}"
    free = "no limit" if report.free_bytes is None else human_size(report.free_bytes)
    yield f"free: {free}"
    if speed is None:
        yield "speed: cannot be measured"
        return
    yield (
        f"speed: {human_size(speed.write_bytes_per_second)}/s written, {human_size(speed.read_bytes_per_second)}/s "
        f"read, {speed.small_files_per_second:.0f} small files/s, a metadata request takes "
        f"{1000 * speed.seconds_per_look:.2f} ms"
    )
