"""`ft-ckpt doctor PLACE`: operations that a folder or bucket supports, and their fallbacks.

On several ranks it also shows how they share the place.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import dataclass

from ft_ckpt.cli import output
from ft_ckpt.cli.doctor_ranks import SharingReport, examine_sharing, show_sharing
from ft_ckpt.cli.options import add_json, print_lines
from ft_ckpt.errors import TargetError
from ft_ckpt.ranks import Ranks, launch_of_process, launched_ranks
from ft_ckpt.storage import Mount, mount_of
from ft_ckpt.storage.local import BUCKET_NEEDS, FOLDER_NEEDS, Ability, try_place
from ft_ckpt.storage.places import Place, open_place
from ft_ckpt.values import human_size

# What saves do if a folder or bucket does not support an operation.
_FALLBACKS = {
    "exchange two folders": (
        "an overwritten checkpoint is put aside file by file; a crash is undone by the next save"
    ),
    "hard links": "files that do not change are written with each checkpoint",
    "writing past the page cache": "all goes through the page cache, slower on most disks",
    "locks": "a dead process is recognised by time alone: leases last 30 minutes, leftovers a day",
    "mapping": "files are read instead of mapped",
    "copies by the service": "files that do not change are sent with each checkpoint",
}


@dataclass(frozen=True)
class PlaceReport:
    """What a folder or bucket supports.

    Attributes:
        place: Its path or URL.
        mount: The mount of its file system; None for a bucket.
        free_bytes: The free space; None if there is no limit.
        abilities: The operations that were tried, and whether they work.
    """

    place: str
    mount: Mount | None
    free_bytes: int | None
    abilities: tuple[Ability, ...]

    @property
    def dangers(self) -> tuple[str, ...]:
        """The reasons why saves are not safe there."""
        needed = FOLDER_NEEDS | (BUCKET_NEEDS if self.mount is None else set())
        dangers = []
        if self.mount is not None and self.mount.is_bucket:
            dangers.append(self.mount.warning)
        for ability in self.abilities:
            if ability.name in needed and not ability.works:
                dangers.append(f"{ability.name}: {ability.detail}")
        return tuple(dangers)


def add_doctor(parser: ArgumentParser) -> None:
    parser.description = (
        "Test whether the folder or bucket PLACE supports the operations that saves need. Started "
        "on several nodes at once by srun, torchrun or accelerate launch, it also tests whether "
        "they share PLACE, what their caches show, and how saves will write there. The exit code "
        "is 1 if saves are not safe there. The test files have hidden names and are deleted."
    )
    parser.add_argument("place", metavar="PLACE", help="Folder, or URL of a bucket.")
    add_json(parser)
    parser.set_defaults(run=_doctor)


def _doctor(options: Namespace) -> int:
    place = open_place(options.place)
    if launch_of_process() is None:
        report = examine_place(place)
        _print_report(report, None, as_json=options.as_json)
        return 1 if report.dangers else 0
    with launched_ranks() as ranks:
        return _examine_on_ranks(place, options, ranks)


def _examine_on_ranks(place: Place, options: Namespace, ranks: Ranks) -> int:
    """Test the folder or bucket on rank 0, then test how all ranks share it.

    Rank 0 prints the results. Returns the exit code, which is the same on all ranks. Collective:
    call it on every rank.
    """
    report: PlaceReport | None = None
    with ranks.deferring_error() as examining:
        if ranks.is_main:
            report = examine_place(place)
    ranks.agree("ft-ckpt doctor", {"place": options.place}, examining.error, same=("place",))
    sharing = examine_sharing(place.folder, ranks)
    if report is not None:
        _print_report(report, sharing, as_json=options.as_json)
    is_safe = report is None or not report.dangers
    verdict = ranks.agree("the verdict of ft-ckpt doctor", {"safe": is_safe}).result
    return 0 if verdict["safe"] else 1


def _print_report(report: PlaceReport, sharing: SharingReport | None, *, as_json: bool) -> None:
    if as_json:
        facts = {**vars(report), "dangers": report.dangers, "safe": not report.dangers}
        output.print_json({**facts, "sharing": sharing})
        return
    _show_place(report)
    if sharing is not None:
        show_sharing(sharing)
    verdicts = [f"not safe: {danger}" for danger in report.dangers]
    print_lines(*(verdicts or ["saves are safe here"]))


def examine_place(place: Place) -> PlaceReport:
    """Test a folder or bucket.

    Raises TargetError if there is no such folder, or nothing can be written there.
    """
    store = place.folder
    if place.is_local and not place.is_folder:
        problem = (
            "a file, expected a folder" if place.is_object else "no such folder; make it first"
        )
        raise TargetError(f"{place}: {problem}")
    mount = None if store.local_folder is None else mount_of(store.local_folder)
    return PlaceReport(str(place), mount, store.free_bytes(), try_place(store))


def _show_place(report: PlaceReport) -> None:
    print_lines(*_place_facts(report))
    rows = []
    for ability in report.abilities:
        if ability.works:
            rows.append((ability.name, "yes", ""))
        else:
            fallback = f"{ability.detail}; {_FALLBACKS.get(ability.name, '')}".rstrip("; ")
            rows.append((ability.name, "no", fallback))
    output.print_table(("", "works", "else"), rows)


def _place_facts(report: PlaceReport) -> Iterator[str]:
    if report.mount is not None:
        yield f"{report.place}: {report.mount.kind}, {report.mount.source} at {report.mount.point}"
    yield f"free: {'no limit' if report.free_bytes is None else human_size(report.free_bytes)}"
