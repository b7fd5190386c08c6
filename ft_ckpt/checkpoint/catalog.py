"""Finds, orders and verifies the checkpoints of a run, and numbers new ones.

Read-only; imports no torch.
"""

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ft_ckpt.checkpoint.checks import (
    are_transient,
    checkpoint_problems,
    retry_transient,
    stored_bytes,
    with_current_cards,
)
from ft_ckpt.checkpoint.contents import visible_folders, why_no_checkpoint
from ft_ckpt.checkpoint.manifest import (
    MANIFEST_LIMIT_BYTES,
    MANIFEST_NAME,
    Manifest,
    check_paths,
    manifest_from_json,
)
from ft_ckpt.checkpoint.metrics import check_metric, read_metrics, write_metric
from ft_ckpt.checkpoint.signature import SignedBy, signature_problems
from ft_ckpt.config import numbers_of
from ft_ckpt.errors import (
    CheckpointError,
    ConfigError,
    CorruptError,
    ManifestError,
    MissingError,
    NotACheckpointError,
    Problem,
    UnreadableError,
    damaged_input,
    listing,
)
from ft_ckpt.messages import warn
from ft_ckpt.storage import (
    LocalStore,
    Place,
    Store,
    hold_listed,
    open_place,
    read_range,
    read_text,
)

_ASKED_AT_ONCE = 16  # manifests of a run in a bucket


@dataclass(frozen=True)
class CheckpointInfo:
    """A committed checkpoint and its manifest."""

    store: Store
    manifest: Manifest

    @property
    def place(self) -> Place:
        return Place(self.store)

    @property
    def path(self) -> Path | str:
        """Its path on this machine, or its URL."""
        return self.place.location

    @property
    def name(self) -> str:
        return self.place.basename

    @cached_property
    def metrics(self) -> Mapping[str, float]:
        """The metrics of the manifest, and those measured since. Raises UnreadableError."""
        return read_metrics(self.store, self.manifest)

    def write_metrics(self, metrics: Mapping[str, float]) -> None:
        """Store metrics that were measured after the save, durably, one after another, in place of
        older values.

        Commands and rules use them like those of the save. They are in marks beside the manifest,
        which does not change. Call it while the checkpoint is leased, as in the loop of
        `ft_ckpt.follow`.

        Raises ConfigError for names that are empty or too long and for values that are no numbers,
        before anything is written; NotACheckpointError if the checkpoint was deleted or saved again
        since it was listed; TargetError.
        """
        numbers = numbers_of(metrics)
        for name in numbers:
            check_metric(name)
        if load_manifest(self.store).created != self.manifest.created:
            raise NotACheckpointError(
                f"{self.path}: saved again since it was listed; measure the new one"
            )
        for name, value in numbers.items():
            write_metric(self.store, self.manifest, name, value)


@dataclass(frozen=True)
class VerifyReport:
    """The outcome of `verify`."""

    path: str | Path
    """The checkpoint: its path, or its URL."""
    ok: bool
    """Whether there are no problems."""
    problems: tuple[str, ...]
    """Differences from the manifest, each with the file first."""
    files: int
    """Number of files that the manifest lists."""
    bytes: int
    """Their size, in bytes."""
    notes: tuple[str, ...] = ()
    """Changes since the save that are no problem: a model card that was written again."""
    is_transient: bool = False
    """Whether the only problems are files that cannot be read now: they may be whole."""


def read_manifest(path: str | os.PathLike[str] | Place) -> Manifest:
    """The manifest of the checkpoint folder `path`, which may be a URL.

    Raises NotACheckpointError, saying what is there, when nothing is committed; ManifestError when
    the manifest is damaged, from a newer ft_ckpt, or contains a path outside the folder;
    UnreadableError when it cannot be read now.
    """
    place = open_place(path)
    try:
        return load_manifest(place.folder)
    except NotACheckpointError:
        raise NotACheckpointError(why_no_checkpoint(place)) from None


def is_delta(place: Place) -> bool:
    """Whether the checkpoint at `place`, if there is one, is a delta of a chain."""
    try:
        return bool(load_manifest(place.folder).delta)
    except CheckpointError:
        return False


def load_manifest(store: Store) -> Manifest:
    """The manifest of the checkpoint in `store`. Raises as `read_manifest` does."""
    return parse_manifest(manifest_text(store), store.where(MANIFEST_NAME))


def manifest_text(store: Store) -> str:
    """The text of the manifest in `store`. Raises as `read_manifest` does."""
    try:
        return read_text(store, MANIFEST_NAME, MANIFEST_LIMIT_BYTES)
    except MissingError as error:
        raise NotACheckpointError(
            f"{store.url}: no {MANIFEST_NAME} in it, so no save was completed there; use another "
            "folder or save again"
        ) from error
    except UnreadableError:
        raise
    except CorruptError as error:
        raise ManifestError(str(error)) from error


def parse_manifest(text: str, where: str) -> Manifest:
    """Parse a manifest and check that its paths stay inside its folder.

    Raises ManifestError, naming `where`.
    """
    manifest = manifest_from_json(text, where)
    check_paths(manifest, where)
    return manifest


@dataclass(frozen=True)
class Listing:
    """The checkpoints in a folder, oldest first, and the manifests there that could not be read,
    with the reasons.

    A retry does not help for `damaged` ones; `unreadable` ones may be whole.
    """

    found: tuple[CheckpointInfo, ...]
    damaged: Mapping[Path | str, CheckpointError]
    unreadable: Mapping[Path | str, CheckpointError]

    def warn_left_out(self) -> None:
        for path, error in {**self.damaged, **self.unreadable}.items():
            warn(f"{path}: left out: {error}", stacklevel=3)

    def require_readable(self) -> None:
        """Raise UnreadableError naming the manifests that cannot be read now: one may be the wanted
        checkpoint.
        """
        if self.unreadable:
            newest = self.found[-1].path if self.found else "none"
            errors = listing([str(error) for error in self.unreadable.values()])
            raise UnreadableError(
                f"{errors}; the newest checkpoint that can be read is {newest}: "
                "try again, or name one"
            )


def list_checkpoints(root: str | os.PathLike[str] | Place, *, links: bool = True) -> Listing:
    """The committed checkpoints in `root` and directly below it, ordered as by `discover`, and
    errors of others.

    Without `links`, folders that are links are left out, and nothing behind them is opened. Raises
    UnreadableError when `root` itself cannot be listed.
    """
    store = open_place(root).folder
    folders = [
        folder for folder in visible_folders(store.list_folder()) if links or not folder.is_link
    ]
    stores = [store, *(store.within(each.name) for each in folders)]
    identities = [store.identity, *(each.identity for each in folders)]
    found: dict[str, CheckpointInfo] = {}
    damaged: dict[Path | str, CheckpointError] = {}
    unreadable: dict[Path | str, CheckpointError] = {}
    for each, identity, result in zip(stores, identities, _read_all(stores), strict=True):
        if isinstance(result, CheckpointInfo):
            # links come last: one to a sibling is not a second checkpoint
            found.setdefault(identity, result)
        elif isinstance(result, UnreadableError):
            unreadable[Place(each).location] = result
        elif result is not None:
            damaged[Place(each).location] = result
    return Listing(tuple(in_run_order(found.values())), damaged, unreadable)


def discover(root: str | os.PathLike[str] | Place) -> list[CheckpointInfo]:
    """The committed checkpoints in `root` and directly below it, oldest first.

    Runs are ordered by their newest checkpoint; checkpoints of one run by step, first those without
    a step in the order of their saves. Hidden folders and folders without a manifest are left out;
    so are, with a warning, those whose manifest is damaged or cannot be read now. Raises
    UnreadableError when `root` itself cannot be listed.
    """
    listed = list_checkpoints(root)
    listed.warn_left_out()
    return list(listed.found)


def list_readable(root: str | os.PathLike[str] | Place) -> Listing:
    """`list_checkpoints` to choose from: damaged manifests are warnings.

    Raises UnreadableError if one cannot be read in three tries: it may be the one to choose;
    NotACheckpointError if `root` is a file.
    """
    place = open_place(root)
    listed = retry_transient(
        lambda: list_checkpoints(place), lambda listed: bool(listed.unreadable)
    )
    listed.require_readable()
    if not listed.found and place.is_object:
        raise NotACheckpointError(why_no_checkpoint(place))
    listed.warn_left_out()
    return listed


def run_checkpoints(run: str | os.PathLike[str] | Place) -> list[CheckpointInfo]:
    """The committed checkpoints directly below the folder `run`, as `discover` returns them."""
    folder = open_place(run).folder
    return [info for info in discover(run) if info.store != folder]


def latest(directory: str | os.PathLike[str] | Place) -> Path | str | None:
    """The newest checkpoint in `directory` that passes `verify(deep=False)`; None if there is none,
    or no folder.

    Checkpoints computed from others (an average, a merged model) are skipped, and invalid ones with
    a warning. Returns a local path or a URL, as `directory` is. Raises UnreadableError when a newer
    one, or any manifest, cannot be read now: it may be the newest; NotACheckpointError when
    `directory` is a file.
    """
    found = find_latest(directory)
    return None if found is None else found.path


def find_latest(directory: str | os.PathLike[str] | Place) -> CheckpointInfo | None:
    """The checkpoint whose location `latest` returns."""
    return _first_valid(
        reversed(_saved_by_training(list_readable(directory).found)), "an older checkpoint"
    )


def best(
    run: str | os.PathLike[str] | Place, metric: str | tuple[str, str] | None = None
) -> Path | str | None:
    """The best checkpoint of the newest run in the folder `run` by a metric; None when none has a
    number.

    `metric` is (name, "min" or "max"). A name alone, or None if there is one metric, is looked up
    in the run's `Keep.best` and `Every.best`. NaN is never the best; the oldest of equal ones is.
    Checkpoints that do not pass `verify(deep=False)` are skipped with a warning. Raises ConfigError
    when the metric or its direction is unknown; UnreadableError when one that may be the best
    cannot be read now.
    """
    found = find_best(run, metric)
    return None if found is None else found.path


def find_best(
    run: str | os.PathLike[str] | Place, metric: str | tuple[str, str] | None = None
) -> CheckpointInfo | None:
    """The checkpoint whose location `best` returns."""
    infos = _saved_by_training(list_readable(run).found)
    infos = [info for info in infos if info.manifest.run_id == infos[-1].manifest.run_id]
    if not infos:
        return None
    name, mode = _wanted_ranking(infos, metric)
    known = [info for info in infos if not math.isnan(info.metrics.get(name, math.nan))]
    known.sort(key=lambda info: info.metrics[name] * (1 if mode == "min" else -1))
    return _first_valid(known, "the next best")


def verify(
    path: str | os.PathLike[str] | Place, *, deep: bool = True, signed_by: SignedBy | None = None
) -> VerifyReport:
    """Compare the files of checkpoint `path` with its manifest.

    Always: names, sizes, the tensors in each safetensors header, each index, the digests of files
    below 1 MiB, and that there are no weights of another save. `deep` also reads all other bytes
    and compares the digests. A model card that was written again since the save is a note of the
    report. `signed_by`: also the signature, see `sign`, and that no file was added, deleted or
    changed since: the path of a public key, or (identity, provider) of a keyless signature.

    Raises NotACheckpointError, ManifestError or UnreadableError as `read_manifest` does;
    ConfigError when a signature cannot be checked: an unusable key, a checkpoint in a bucket, no
    model-signing library.
    """
    store = open_place(path).folder
    found_at = Place(store).location
    while True:
        before = _manifest_version(store)
        seen = store if before is None else hold_listed(store)
        try:
            manifest = load_manifest(seen)
        except NotACheckpointError:
            raise NotACheckpointError(why_no_checkpoint(Place(store))) from None
        with damaged_input(found_at):
            current, notes = with_current_cards(seen, manifest)
            problems = list(dict.fromkeys(checkpoint_problems(seen, current, deep=deep)))
            if signed_by is not None:
                problems += map(Problem, signature_problems(store, store, manifest, signed_by))
        # A concurrent save may have overwritten the checkpoint, so that a mixture of both was read.
        # Read again.
        if not problems or _manifest_version(store) == before:
            size_bytes = stored_bytes(seen, current)
            return VerifyReport(
                found_at,
                ok=not problems,
                problems=tuple(str(problem) for problem in problems),
                files=len(manifest.files),
                bytes=size_bytes,
                notes=notes,
                is_transient=are_transient(problems),
            )


def _saved_by_training(infos: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
    # not computed from other checkpoints
    return [info for info in infos if not info.manifest.made_from]


def _read_all(stores: Sequence[Store]) -> list[CheckpointInfo | CheckpointError | None]:
    """`_checkpoint_info` of each; in parallel for buckets, where each takes a request."""
    if stores[0].local_folder is not None:
        return list(map(_checkpoint_info, stores))
    from concurrent.futures import ThreadPoolExecutor  # lazily: listing a disk does not need it

    with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:
        return list(pool.map(_checkpoint_info, stores))


def _checkpoint_info(store: Store) -> CheckpointInfo | CheckpointError | None:
    """The checkpoint committed in `store`, or the error of reading it; None when nothing is
    committed there.
    """
    try:
        with damaged_input(store.url):
            return CheckpointInfo(store, load_manifest(store))
    except NotACheckpointError:
        return None
    except CheckpointError as error:
        return error


def in_run_order(infos: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
    """Sort oldest first; a restarted run is newer than an earlier run that got further.

    Within a run by step, number, time: clocks may go back, so the number comes before the time.
    Stable.
    """
    infos, newest = list(infos), dict[str | None, str]()
    for info in infos:
        run = info.manifest.run_id
        newest[run] = max(newest.get(run, ""), info.manifest.created)

    def age(info: CheckpointInfo) -> tuple[str, int, int, str]:
        manifest = info.manifest
        step = -1 if manifest.step is None else manifest.step
        return (newest[manifest.run_id], step, manifest.number or 0, manifest.created)

    return sorted(infos, key=age)


def _first_valid(infos: Iterable[CheckpointInfo], instead: str) -> CheckpointInfo | None:
    """The first that passes `verify(deep=False)`; each damaged one before it is a warning.

    Raises UnreadableError if one before it cannot be read now.
    """
    unread: list[str] = []
    for info in infos:
        try:
            problems = damage_of(info.place)
        except UnreadableError as error:
            unread.append(str(error))
            continue
        except CheckpointError as error:  # deleted or damaged since it was listed
            problems = (str(error),)
        if not problems and not unread:
            return info
        if not problems:
            raise UnreadableError(
                f"{unread[0]}; the newest readable checkpoint is {info.path}: "
                "try again, or name that one"
            )
        if not unread:
            warn(f"{info.path}: not valid, using {instead}: {'; '.join(problems)}", stacklevel=4)
    if unread:
        raise UnreadableError(f"{unread[0]}; no other checkpoint can be read: try again")
    return None


def damage_of(place: Place, *, deep: bool = False) -> tuple[str, ...]:
    """The problems that `verify` reports; it is repeated if they may be temporary.

    Raises as `verify` does, and UnreadableError if the only problem is that files cannot be read
    now.
    """

    def find_problems() -> tuple[Problem, ...]:
        try:
            report = verify(place, deep=deep)
        except UnreadableError as error:
            return (Problem(str(error), is_transient=True),)
        return tuple(Problem(text, report.is_transient) for text in report.problems)

    problems = retry_transient(find_problems, are_transient)
    if are_transient(problems):
        raise UnreadableError(f"{place}: {listing(problems)}; try again")
    return tuple(problem.text for problem in problems)


def _wanted_ranking(
    infos: Sequence[CheckpointInfo], metric: str | tuple[str, str] | None
) -> tuple[str, str]:
    """The name of the metric to rank by, and "min" or "max".

    Raises ConfigError if that is ambiguous or unknown.
    """
    if isinstance(metric, tuple) and len(metric) == 2 and metric[1] in ("min", "max"):
        return metric
    rankings = {name: mode for info in infos for name, mode in info.manifest.rankings.items()}
    candidates = [name for name in rankings if metric in (None, name)]
    if len(candidates) == 1:
        return candidates[0], rankings[candidates[0]]
    known = sorted({name for info in infos for name in info.metrics})
    raise ConfigError(
        f"metric={metric!r}: expected (name, 'min' or 'max'); the run's Keep and Every rank by "
        f"{listing(sorted(rankings), ', ') or 'none'}, its checkpoints have "
        f"{listing(known, ', ') or 'no metrics'}"
    )


def _manifest_version(store: Store) -> str | None:
    try:
        found = store.stat(MANIFEST_NAME)
    except UnreadableError:
        return None
    return None if found is None else found.version


_HEAD_BYTES = 64 << 10  # of a manifest: contains the scalar fields


def next_number(target: Store, beside: Store) -> int:
    """The number of a new checkpoint without a step: one more than the largest in both folders and
    directly below.
    """
    numbers = []
    for store in (target, beside):
        below = [store.within(folder.name) for folder in visible_folders(store.list_folder())]
        numbers += [_number_in_head(each) for each in (store, *below)]
    return 1 + max(numbers)


def _number_in_head(store: Store) -> int:
    """The number of the checkpoint in `store`, read from the start of its manifest; 0 when it has
    none.
    """
    try:
        with closing(store.open(MANIFEST_NAME)) as file:
            head = read_range(file, 0, _HEAD_BYTES)
    except CorruptError:
        return 0
    found = re.search(rb'^  "number": (\d{1,18}),$', head, re.MULTILINE)
    return int(found[1]) if found else 0


def is_hub_name(name: str) -> bool:
    """Whether `name` is a valid model id of the Hub, and not a local folder."""
    from huggingface_hub.errors import HFValidationError  # lazily: `ft-ckpt ls` does not need it
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # not in its __all__

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not LocalStore(Path(name)).list_folder().exists
