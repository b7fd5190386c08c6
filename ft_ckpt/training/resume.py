"""Resume: choose a checkpoint, open it on all ranks, restore each item, report the outcome of each.

Each rank reads what it holds: the number of ranks and their wrappers may be others than those that saved.
"""

import ctypes
import json
import os
import threading
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ft_ckpt.checkpoint.catalog import (
    CheckpointInfo,
    Listing,
    in_run_order,
    list_checkpoints,
    list_readable,
    load_manifest,
)
from ft_ckpt.checkpoint.checks import look_again, may_pass
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME, Manifest, manifest_from_json, manifest_to_json
from ft_ckpt.checkpoint.open_checkpoint import OpenCheckpoint, open_checkpoint
from ft_ckpt.checkpoint.prune import recover_all
from ft_ckpt.checkpoint.run_places import RunPlaces
from ft_ckpt.distributed.agreement import Values, rank_numbers
from ft_ckpt.distributed.fill import Filler, WantedTensor, check_all, each_reads, fill_tensor
from ft_ckpt.distributed.ranks import Ranks, beside_thread, current_ranks, try_action
from ft_ckpt.distributed.replicas import WEIGHTS, own_name, own_part, place_of
from ft_ckpt.distributed.source import Source
from ft_ckpt.errors import (
    CheckpointError,
    ConfigError,
    CorruptError,
    LoadError,
    ManifestError,
    NotACheckpointError,
    RankError,
    RanksDisagreeError,
    TargetError,
    UnreadableError,
    damaged_input,
    listing,
)
from ft_ckpt.formats.dtypes import dtype_of
from ft_ckpt.formats.layout import ITEM_BYTES, Spec, TensorFile
from ft_ckpt.messages import LOG, warn
from ft_ckpt.model.base_model import differences_of_base
from ft_ckpt.model.selection import module_at
from ft_ckpt.model.settings import adapter_settings, differences_of_live
from ft_ckpt.storage.digests import PassingProblem
from ft_ckpt.storage.local_store import LocalStore
from ft_ckpt.storage.place import Place, open_place
from ft_ckpt.storage.proofs import PartDigests, compare_digests, read_late
from ft_ckpt.training.accelerate_folder import find_accelerate_folder, is_foreign, open_accelerate_folder
from ft_ckpt.training.exchange import decide_together, hear_leader
from ft_ckpt.training.items import (
    ENGINE,
    ExtraState,
    Item,
    Key,
    labelled_sources,
    model_sources,
    optimizers_among,
    tied_names,
)
from ft_ckpt.training.state import (
    FOLDER,
    Document,
    ResumePoint,
    StoredTensors,
    description_of_rank,
    entries_of_rank,
    open_resume_point,
    tree_of,
)
from ft_ckpt.transfer.copies import content_identity


@dataclass(frozen=True)
class Restored:
    """What became of one item: `status` is "restored", "absent" (on one side) or "failed"; `detail` says why."""

    name: str
    status: str
    detail: str = ""


class Unread(Restored):
    """An item that could not be read from its file."""


@dataclass(frozen=True)
class RestoreReport:
    """The outcome of a resume, item by item, and how the run differs from the one that saved."""

    path: Path | str | None = None
    """The checkpoint; None when nothing was resumed and the run began afresh."""
    items: tuple[Restored, ...] = ()
    """Each with its `name`, `status` ("restored", "absent" on one side, or "failed") and a `detail` that says why."""
    differences: tuple[str, ...] = ()
    """Settings in which this run differs from the one that saved."""
    notes: tuple[str, ...] = ()
    """What the resume decided and a reader should know."""
    requests: int = 0
    """Ranges of the checkpoint that all ranks together have asked a bucket for; 0 where it is on a disk."""

    @property
    def problems(self) -> tuple[str, ...]:
        """A line for each item that was not restored."""
        return tuple(f"{item.name}: {item.status}: {item.detail}" for item in self.items if item.status != "restored")


@dataclass(frozen=True)
class Damage:
    """What is wrong with files of a checkpoint, found when parts of the run were overwritten already."""

    damaged: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    """Files that the system would not read just now."""

    @property
    def problems(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.damaged, *map(PassingProblem, self.unread))


@dataclass
class RestoreStake:
    """What resumes have overwritten, by name, since the last that ended well."""

    names: frozenset[str] = frozenset()

    def put_names(self, document: Document, where: Path | str) -> None:
        """Note what is overwritten from now on.

        Raises LoadError for a checkpoint that lacks what earlier ones have overwritten, which would stay.
        """
        held = frozenset(document["weights"]) | document["items"].keys()
        if lost := self.names - held:
            raise LoadError(
                f"{where}: has no {listing(sorted(lost), ', ')}, which a resume that failed has overwritten; build "
                "model, optimizer and saver anew, then resume it"
            )
        self.names |= held

    def clear(self) -> None:
        """All of it is as one checkpoint says."""
        self.names = frozenset()

    def refuse_half_restored(self) -> None:
        """Raise LoadError when the last resume has failed on the way."""
        if self.names:
            raise LoadError(
                "the last resume() failed when parts of the model were overwritten already: resume another checkpoint, "
                "or build model, optimizer and saver anew"
            )


@dataclass(frozen=True)
class _Compared:
    """What a rank tells of the files that it was to compare."""

    found: tuple[PartDigests, ...]
    failures: Damage


@dataclass(frozen=True)
class RankOutcomes:
    """What a rank tells the others of its resume."""

    items: tuple[Restored, ...]
    requests: int


def merge_outcomes(answers: Sequence[RankOutcomes]) -> RankOutcomes:
    """One outcome for each item: the first that is no success, with its rank named; and all requests."""
    merged: dict[str, Restored] = {}
    for rank, answer in enumerate(answers):
        for item in answer.items:
            known = merged.get(item.name)
            if item.status != "restored" and (known is None or known.status == "restored"):
                told = f"on rank {rank}: {item.detail}" if rank else item.detail
                merged[item.name] = replace(item, detail=told)
            elif known is None:
                merged[item.name] = item
    return RankOutcomes(tuple(merged.values()), sum(answer.requests for answer in answers))


def restore_weights(
    found: Mapping[Key, Source], document: Document, stored: StoredTensors, fill_all: Filler = each_reads
) -> Restored:
    """Every tensor of the model that is saved, in place, on each rank its block.

    An adapter's checkpoint lacks the frozen parameters of its base, and nothing else.
    """
    weights, known = document["weights"], model_sources(found)
    unknown = [name for name in weights if name not in known]
    if unknown:
        return Restored("weights", "failed", f"{listing(unknown, ', ')}: in the checkpoint, not in the model")

    def wanted_tensors() -> list[WantedTensor]:
        once = {known[name].key: (known[name], *place) for name, place in reversed(weights.items())}
        places = reversed(once.values())
        return [WantedTensor(one, one.local, stored.file_of(part, name), name) for one, part, name in places]

    left = [name for name, source in known.items() if name not in weights and not _is_elsewhere(source, stored)]
    if left:
        return Restored("weights", "failed", f"{listing(left, ', ')}: in the model, not in the checkpoint")
    return _try_restore("weights", lambda: fill_all("weights", wanted_tensors))


def find_misfits(
    items: Sequence[Item], found: Mapping[Key, Source], document: Document, stored: StoredTensors, rank: int
) -> list[Restored]:
    """What cannot be restored, as far as that is known before anything is overwritten; objects are not asked."""

    def only_check(_what: str, collect: Callable[[], list[WantedTensor]]) -> None:
        check_all(collect())

    outcomes = [restore_weights(found, document, stored, only_check)]
    for item in items:
        if item.name in document["items"]:
            entry = document["items"][item.name]
            give = _StoredItem(item.name, stored, only_check)
            outcomes.append(_try_restore(item.name, lambda: _check_item(item, entry, found, give, rank)))  # noqa: B023
        elif not _is_dispensable(item, document):
            outcomes.append(Restored(item.name, "absent", "not in the checkpoint"))
    known = {ENGINE, *(item.name for item in items)}
    outcomes += [
        Restored(name, "absent", "in the checkpoint, not in this run")
        for name in document["items"]
        if name not in known
    ]
    return [one for one in outcomes if one.status != "restored"]


def _check_item(item: Item, entry: Document, found: Mapping[Key, Source], give: "_StoredItem", rank: int) -> None:
    """Raise LoadError where the state of an item is not one of its kind, or does not fit a model or an optimizer."""
    key = {"optimizer": "optimizer", "model": "model"}.get(item.kind, "tree")
    if key not in entry:
        raise LoadError(f"another kind of object in the checkpoint, expected the state of this {item.kind}")
    if item.kind == "optimizer":
        ((_, kind, optimizer),) = optimizers_among([item])
        kind.check(optimizer, description_of_rank(entry["optimizer"], rank), labelled_sources(found))
    elif item.kind == "model":
        _restore_item(item, entry, found, give)


def _is_dispensable(item: Item, document: Document) -> bool:
    """Whether a state may lack an item of a run."""
    if item.name == ENGINE:
        return True  # counts of DeepSpeed's, which begin anew where the run comes from elsewhere
    # an earlier version kept it with the weights
    return isinstance(item.value, ExtraState) and item.value.state_dict().keys() <= document["weights"].keys()


def compare_base(
    model: nn.Module, attribute: str | None, document: Document, held: OpenCheckpoint, rank: int
) -> list[Restored]:
    """Whether the base of the run's adapters, where the checkpoint is without it, is the one they were trained on."""
    compared, problems = differences_of_base(model, held.manifest.parts, document["weights"], rank, attribute)
    if problems:
        detail = f"not the base that the adapters were trained on ({listing(problems)})"
        return [Restored("base", "failed", detail)]
    return [Restored("base", "restored", f"not in the checkpoint; {compared} tensors compared")] if compared else []


def compare_adapters(
    model: nn.Module, attribute: str | None, held: OpenCheckpoint, stored: StoredTensors
) -> list[Restored]:
    """A failed item where adapters of the run would compute other numbers from the tensors of the checkpoint.

    On a rank that does not see the checkpoint nothing is compared; the outcome of rank 0 counts for all.
    """
    if stored.is_remote:
        return []
    configs: Mapping[str, Any] = getattr(module_at(model, attribute or ""), "peft_config", None) or {}
    records = [record for record in held.manifest.parts if record.kind == "adapter" and record.adapter in configs]

    def compare() -> None:
        stores = [(str(record.adapter), Place(held.store, record.path).folder) for record in records]
        problems = [
            f"{name}: {field} is {found}, {expected} in the checkpoint"
            for name, store in stores
            for field, expected, found in differences_of_live(adapter_settings(store), configs[name])
        ]
        if problems:
            raise LoadError(f"{listing(problems)}; make the adapter with the settings of the saved run")

    outcome = _try_restore("adapter settings", compare)
    return [outcome] if outcome.status == "failed" else []


def restore_items(
    items: Sequence[Item],
    found: Mapping[Key, Source],
    document: Document,
    stored: StoredTensors,
    rank: int,
    fill_all: Filler = each_reads,
) -> list[Restored]:
    """The state of each item that the checkpoint has."""
    outcomes = []
    for item in items:
        if item.name not in document["items"]:
            continue
        entry = entries_of_rank(document, rank).get(item.name) or document["items"][item.name]
        if item.kind == "optimizer":
            entry = {**entry, "optimizer": description_of_rank(entry["optimizer"], rank)}
        prefix = f"rank-{rank}/{item.name}" if item.name in entries_of_rank(document, rank) else item.name
        alike = not any(item.name in one for one in document["ranks"])  # else each rank reads for itself
        give = _StoredItem(prefix, stored, fill_all if alike else each_reads)
        outcomes.append(_try_restore(item.name, lambda: _restore_item(item, entry, found, give)))  # noqa: B023 - called at once
    return outcomes


def find_damage(point: ResumePoint, outcomes: Sequence[Restored], ranks: Ranks) -> Damage:
    """What is wrong with files of `point` that ranks were to compare while they read them, the same on all ranks.

    What nobody has read is read for it; a file is damaged, too, that one of the `outcomes` could not be read from.
    Collective, where comparisons are late.
    """
    if not point.is_proved_late:
        return Damage()

    def compare_all(answers: Sequence[_Compared]) -> Damage:
        failures = [failure for answer in answers for failure in answer.failures.problems]
        found = [part for answer in answers for part in answer.found]
        return _damage(compare_digests(point.tensors.late_files, found, failures))

    found, failures = read_late(point.tensors.proofs)
    where = f" (on rank {ranks.rank})"
    unread = tuple(type(item.detail)(item.detail + where) for item in outcomes if isinstance(item, Unread))
    mine, kinds = _Compared(found, _damage(failures or unread)), (_Compared, Damage)
    return decide_together(ranks, "comparing the checkpoint of resume()", mine, compare_all, kinds)[0]


def _damage(problems: Collection[str]) -> Damage:
    passing = tuple(one for one in problems if isinstance(one, PassingProblem))
    return Damage(tuple(one for one in problems if not isinstance(one, PassingProblem)), passing)


def report_of_failed(path: Path | str, outcomes: Sequence[Restored], error: RanksDisagreeError) -> RestoreReport:
    """What has failed before ranks were out of step, which is why they were; raises `error` where nothing has."""
    if any(item.status == "failed" for item in outcomes):
        return RestoreReport(path, tuple(outcomes))
    raise error


def restore_apart(
    items: Sequence[Item], found: Mapping[Key, Source], document: Document, stored: StoredTensors, ranks: Ranks
) -> tuple[list[Restored], list[str]]:
    """What ranks had come apart in, each rank its own; and in words what cannot be put back so. Collective.

    Everything has the first rank's before this, and keeps it where the number of ranks is another, or ranks hold other
    parts now.
    """
    apart: dict[str, dict[str, str | None]] = document.get("apart", {})
    if not apart:
        return [], []
    live, here = _tensors_by_name(items, found, document), str(ranks.rank)
    same = ranks.size == len(document["ranks"])
    had = {name: odd[here] for name, odd in apart.items() if here in odd and name in live and same}
    mine = [name for name, place in had.items() if _is_own(live[name], place, ranks.rank)]
    left = [name for name, odd in apart.items() if (here in odd or not same) and name not in mine]
    lost = ranks.agree("what ranks had come apart in", {"left": left}, decide=_all_left).told
    told = [f"{listing(lost, ', ')}: not the same on all ranks that saved, rank 0's on all now"] if lost else []

    def wanted_tensors() -> list[WantedTensor]:
        parts = {own_name(name, ranks.rank): own_part(live[name], ranks.rank) for name in mine}
        return [WantedTensor(one, one.local, stored.file_of(FOLDER, own), own) for own, one in parts.items()]

    if len(lost) == len(apart):
        return [], told
    return [_try_restore("replicas", lambda: each_reads("replicas", wanted_tensors))], told


def _all_left(values: Values) -> list[str]:
    """The names that any rank has left, as its report says them."""
    return list(dict.fromkeys(name.removeprefix(f"{WEIGHTS}/") for value in values for name in value["left"]))


def _is_own(source: Source, place: str | None, rank: int) -> bool:
    """Whether a rank may have a tensor of its own there, as it lay at `place`, in memory that is the model's."""
    return source.sharding.is_replicated and not source.is_added and place_of(source.sharding, rank) == place


def _tensors_by_name(items: Sequence[Item], found: Mapping[Key, Source], document: Document) -> dict[str, Source]:
    """The tensors of a run by the names of `replicas`."""
    live = {f"{item or WEIGHTS}/{name}": source for (item, name), source in found.items()}
    for item, kind, optimizer in optimizers_among(items):
        if item.name in document["items"]:
            state = kind.tensors(optimizer, document["items"][item.name]["optimizer"], labelled_sources(found))
            live |= {f"{item.name}/{name}": source for name, source in state.items()}
    return live


def _is_elsewhere(source: Source, stored: StoredTensors) -> bool:
    """Whether a tensor that is not among a checkpoint's weights need not be."""
    return source.is_added or (stored.is_adapter and source.is_parameter and not source.trainable)


def _try_restore(name: str, action: Callable[[], Any]) -> Restored:
    try:
        detail = action()
    except CorruptError as error:
        kind = PassingProblem if isinstance(error, UnreadableError) else str
        return Unread(name, "failed", kind(error))
    except Exception as error:  # noqa: BLE001 - every item is tried, and all failures are told together
        text = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        return Restored(name, "failed", text)
    return Restored(name, "restored", detail or "")


@dataclass(frozen=True)
class _StoredItem:
    """Stored tensors of one item, for the sources that want them."""

    prefix: str
    stored: StoredTensors
    fill_all: Filler

    def wanted_by(self, source: Source, name: str) -> WantedTensor:
        """What `fill_all` takes."""
        stored_name = f"{self.prefix}/{name}"
        return WantedTensor(source, source.local, self.stored.file_of(FOLDER, stored_name), stored_name)

    def fill_now(self, source: Source) -> None:
        """Fill the source at once."""
        fill_tensor(self.wanted_by(source, source.name))


def _restore_item(item: Item, entry: Document, found: Mapping[Key, Source], give: _StoredItem) -> str:
    notes: list[str] = []
    if item.kind == "optimizer":

        def wanted_state() -> list[WantedTensor]:
            sources: list[Source] = []
            ((_, kind, optimizer),) = optimizers_among([item])
            known = labelled_sources(found)
            notes.extend(kind.restore(optimizer, entry["optimizer"], known, give.fill_now, sources.append))
            return [give.wanted_by(source, source.name) for source in sources]

        give.fill_all(item.name, wanted_state)
    elif item.kind == "model":
        give.fill_all(item.name, lambda: _wanted_of_model(model_sources(found, item.name), give))
    else:
        item.value.load_state_dict(tree_of(entry, give.prefix, give.stored, item.value))
    return "; ".join(notes)


def _wanted_of_model(own: Mapping[str, Source], give: _StoredItem) -> list[WantedTensor]:
    """Every tensor of a further model, tied ones under the name that is stored. Raises LoadError for what differs."""
    names = give.stored.state_names(f"{give.prefix}/")
    groups = {next((name for name in group if name in names), group[0]): group for group in tied_names(own)}
    problems = [f"{name}: in the model, not in the checkpoint" for name in groups if name not in names]
    problems += [f"{name}: in the checkpoint, not in the model" for name in sorted(names) if name not in own]
    if problems:
        raise LoadError(listing(problems))
    return [give.wanted_by(own[name], name) for name in groups]


MODES = ("auto", "must", "never")
_AUTO = ("latest", "newest", "last", "True", "true")


def parse_mode(checkpoint: Any) -> str | Place:
    """What `resume` was asked for, as one of MODES, or the name, path, URL or place of a checkpoint.

    Raises ConfigError.
    """
    if checkpoint is None or checkpoint is True or checkpoint in _AUTO:
        if checkpoint is not None:
            LOG.info("resume(%r) is resume('auto'): the newest checkpoint, or a fresh start", checkpoint)
        return "auto"
    if checkpoint is False:
        return "never"
    if isinstance(checkpoint, Place):
        return checkpoint
    if isinstance(checkpoint, (str, Path)) and str(checkpoint):
        return str(checkpoint)
    raise ConfigError(
        f"resume({checkpoint!r}): expected {', '.join(map(repr, MODES))}, a checkpoint's name, its path or its URL"
    )


@dataclass(frozen=True)
class Wanted:
    """What a run is asked to resume from: a `mode` as `parse_mode` gives it, in the run's own folders."""

    mode: str | Place
    places: RunPlaces
    options: Mapping[str, Any] = field(default_factory=dict)  # of the client for a URL
    deep: bool = True  # all digests are compared
    late: bool = False  # those of tensor files while these are read, when parts of the run are overwritten already
    damage: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # found so, by the places of checkpoints

    @property
    def is_named(self) -> bool:
        """Whether one checkpoint is asked for, by its name, path, URL or place."""
        return self.mode not in MODES

    @property
    def place(self) -> Place:
        """The checkpoint that is named: the run's own of that name, else a path, as is what has a separator."""
        if isinstance(self.mode, Place):
            return self.mode
        if self.places.directory is None or os.sep in self.mode:
            return self.called(self.mode)
        own = [Place(each.folder, self.mode) for each in reversed(self.places.folders)]
        known = [each for each in (*own, open_place(self.mode)) if _folder_exists(each)]
        return next(iter(known), own[-1])

    def without(self, point: ResumePoint, damage: tuple[str, ...]) -> "Wanted":
        """The same, but for a checkpoint that was found damaged while it was read."""
        return replace(self, damage={**self.damage, _place_key(Place(point.checkpoint.origin)): damage})

    def called(self, path: str) -> Place:
        """The place at a path or URL, by the client that there is where it lies in the run's directory."""
        for known in (self.mode, self.places.directory):
            if isinstance(known, Place) and f"{path}/".startswith(f"{known.folder.url}/"):
                below = path[len(known.folder.url) + 1 :]
                return Place(known.folder, below) if below else known
        return open_place(path, **self.options)


def open_chosen(wanted: Wanted, infos: Sequence[CheckpointInfo], stack: ExitStack) -> ResumePoint | None:
    """The checkpoint to resume from, open until the stack ends; None to start afresh. `infos` are the run's.

    What was compared with its manifest are the open files that are then read. Of several copies the first that is whole
    is taken, from the end of `infos`.

    `wanted`: "never"; "auto", the newest that is whole and resumable, or None where there is none at all; "must", the
    newest, or an error; else one checkpoint. Raises NotACheckpointError when there is none, CorruptError when none is
    whole, or naming the damaged files of the one asked for and the newest whole one.
    """
    mode, wanted = wanted.mode, replace(wanted, late=wanted.late and _hold_the_same(infos))
    if mode == "never":
        return None
    foreign = accelerate_folder_at(wanted.place) if wanted.is_named else None
    if foreign is not None:
        return open_accelerate_folder(foreign, stack)
    known = _grouped_copies(resumable(reversed(infos)))
    candidates = [_copies_of(_named_checkpoint(wanted, infos), known)] if wanted.is_named else known
    for number, copies in enumerate(candidates):
        point, problems = _open_one_of(copies, wanted, stack)
        if point is not None:
            return point
        if mode != "auto" or may_pass(problems):
            early, left = replace(wanted, late=False), candidates[number + 1 :]
            older = next((one[0] for one in left if _open_one_of(one, early, stack)[0]), None)
            advice = f"the newest whole one is {older}" if older else "there is no older one that is whole"
            kind = UnreadableError if may_pass(problems) else CorruptError
            raise kind(f"{listing(problems)}; {advice}{_told_overwritten(wanted)}")
        warn(f"{listing(problems)}; damaged, trying an older one", stacklevel=2)
    if candidates:
        raise CorruptError(
            f"{wanted.places.directory}: none of its {len(candidates)} checkpoints is whole (the warnings say why); "
            f"resume('never') begins afresh, in a folder of its own{_told_overwritten(wanted)}"
        )
    if mode == "must":
        raise NotACheckpointError(
            f"{wanted.places.directory}: no checkpoint with training state in it; use resume('auto') to begin"
        )
    return None


def _hold_the_same(infos: Iterable[CheckpointInfo]) -> bool:
    """Whether any of `infos` overwrites all tensors of a model that another one does."""
    return len({_overwritten_names(info.manifest) for info in resumable(infos)}) < 2


def _overwritten_names(manifest: Manifest) -> frozenset[tuple[str, str]]:
    stored = ((part, tensor.name) for part in manifest.parts for tensor in part.tensors)
    return frozenset((part.path, name) for part, name in stored if part.kind != "state" or name.startswith("weights/"))


def _told_overwritten(wanted: Wanted) -> str:
    return "; the model was partly overwritten before this was found: build it anew" if wanted.damage else ""


def _place_key(place: Place) -> str:
    """Equal for all ways to name a place."""
    return place.absolute.folder.url


def resumable(infos: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
    """Those of `infos` that runs can be resumed from."""
    return [info for info in infos if has_training_state(info.manifest)]


def accelerate_folder_at(place: Place) -> Path | None:
    """The folder of Accelerate's `save_state` on this machine that is meant by `place`; None when it is none."""
    store = place.folder
    return find_accelerate_folder(store.folder) if isinstance(store, LocalStore) else None


def _grouped_copies(infos: Iterable[CheckpointInfo]) -> list[list[Place]]:
    """The places of checkpoints in their order, those of copies of one together."""
    found: dict[str, list[Place]] = {}
    for info in infos:
        found.setdefault(content_identity(info.manifest), []).append(Place(info.store))
    return list(found.values())


def _copies_of(named: Place, known: Iterable[list[Place]]) -> list[Place]:
    """The checkpoint `named` first, then its copies among those `known`."""
    beside = next((copies for copies in known if any(one.folder == named.folder for one in copies)), [])
    return [named, *(one for one in beside if one.folder != named.folder)]


def _named_checkpoint(wanted: Wanted, infos: Sequence[CheckpointInfo]) -> Place:
    """The one checkpoint that is asked for, which has training state."""
    named = wanted.place
    if not _folder_exists(named):
        there = list(dict.fromkeys(info.name for info in infos))
        raise NotACheckpointError(
            f"{named}: is not there; {wanted.places.directory} has {listing(there, ', ') or 'none'}. Expected 'auto', "
            "'must', 'never', the name of one of these, or a path"
        )
    if not has_training_state(load_manifest(named.folder)):
        raise NotACheckpointError(f"{named}: holds weights and no training state; ft_ckpt.load_model reads them")
    return named


def _folder_exists(place: Place) -> bool:
    return place.folder.list_folder().exists


def _open_one_of(copies: Sequence[Place], wanted: Wanted, stack: ExitStack) -> tuple[ResumePoint | None, list[str]]:
    """The first of the copies of a checkpoint that is whole, open until the stack ends; or None, and the problems.

    Where one of them may be whole, the problems are those of that one.
    """
    problems: list[str] = []
    for place in copies:
        point, found = look_again(lambda: _open_whole(place, wanted, stack), lambda tried: may_pass(tried[1]))  # noqa: B023 - called at once
        if point is not None:
            if problems:
                warn(f"{listing(problems)}; damaged, taking its copy {place}", stacklevel=2)
            return point, []
        kind = PassingProblem if may_pass(found) else str
        problems.append(kind(f"{place}: {listing(list(found))}"))
    return None, [one for one in problems if isinstance(one, PassingProblem)] or problems


def _open_whole(place: Place, wanted: Wanted, stack: ExitStack) -> tuple[ResumePoint | None, tuple[str, ...]]:
    """The checkpoint at `place`, open until the stack ends; or None, and what is wrong with it."""
    if known := wanted.damage.get(_place_key(place)):
        return None, known
    with ExitStack() as trial:
        try:
            held = trial.enter_context(open_checkpoint(place, compares=False))
            proofs = held.late_proofs() if wanted.deep and wanted.late else []
            late = {proof.record.path for proof in proofs}
            found = held.find_problems(wanted.deep, keep=held.tensor_files, late=late)
            if not found:
                point = open_resume_point(held, trial, proofs)
                stack.push(trial.pop_all())
                return point, ()
        except UnreadableError as error:
            return None, (PassingProblem(error),)
        except (ManifestError, CorruptError, OSError) as error:
            return None, (str(error),)
    return None, found


def has_training_state(manifest: Manifest) -> bool:
    """Whether the checkpoint has training state."""
    return any(part.kind == "state" for part in manifest.parts)


def branch_run_id(wanted: Wanted, chosen: OpenCheckpoint, infos: Sequence[CheckpointInfo]) -> str | None:
    """A name for the run that goes on from `chosen`, if it was asked for by name and its run has got further.

    `infos` are the checkpoints in the run's directory.
    """
    if not wanted.is_named:
        return None
    beside, manifest = Place(chosen.origin).beside, chosen.manifest
    if is_foreign(manifest):
        return uuid.uuid4().hex
    is_own = any(beside.url == each.absolute.folder.url for each in wanted.places.folders)
    all_beside = infos if is_own else list_readable(Place(beside)).found
    steps = [one.manifest.step or 0 for one in resumable(all_beside) if one.manifest.run_id == manifest.run_id]
    return uuid.uuid4().hex if any(step > (manifest.step or 0) for step in steps) else None


def warn_of_others(directory: Place, infos: Sequence[CheckpointInfo], mode: str | Place) -> None:
    """Say that a folder with checkpoints `infos` holds more runs than the one that goes on, or any beside a new one."""
    newest: dict[str | None, str] = {}
    for info in resumable(infos):
        newest[info.manifest.run_id] = info.name
    runs = [f"{str(run_id)[:6]} (to {name})" for run_id, name in newest.items()]
    if mode == "never" and runs:
        warn(
            f"{directory}: holds another run, {listing(runs, ', ')}; its checkpoints are not replaced: use another "
            "directory, or delete them",
            stacklevel=4,
        )
    elif mode in MODES and len(runs) > 1:
        warn(
            f"{directory}: holds {len(runs)} runs, oldest first {listing(runs, ', ')}; the newest goes on. Use a "
            "directory for each",
            stacklevel=4,
        )


def refuse_replacing(target: Place, has_state: bool, own_ids: Collection[str] | None) -> None:
    """Raise TargetError when a checkpoint is there that one with or without state must not replace.

    One with state is not replaced by one without; with `own_ids`, the names of a run, none of another run is. Raises
    UnreadableError when the manifest there cannot be read just now.
    """
    try:
        manifest = load_manifest(target.folder)
    except ManifestError:
        return  # nothing is committed there, or it is damaged
    if has_training_state(manifest) and not has_state:
        raise TargetError(
            f"{target}: holds training state, which a save of weights alone would delete; save to another path"
        )
    if own_ids is not None and manifest.run_id is not None and manifest.run_id not in own_ids:
        raise TargetError(
            f"{target}: of another run, {manifest.run_id[:6]}, which got to this step before; use another directory, "
            "resume that run, or delete its checkpoints"
        )


_LANE = "serving"
_DONE, _FAILED = b"+", b"-"  # the last byte of an answer
_PIECE_BYTES = 4 << 20  # of one answer: torch's store ends at 8 MiB; rank 0's host keeps it until it is taken
_AHEAD = 2  # answers of one rank that may wait there
_WAIT = timedelta(seconds=0.5)  # between looks at whether the other side is still there

Read = Callable[[str, str, int, int], Tensor]  # folder of a part, tensor, flat elements [start, stop) -> on the host


@dataclass(frozen=True)
class CheckpointFacts:
    """By what rank 0 tells the others which checkpoint it has chosen."""

    path: str
    identity: str
    place: tuple[int, ...]  # what is the same of its manifest on all machines that share its disk, and not of a copy


@dataclass(frozen=True)
class _Sight:
    sees: bool
    shares: bool  # the comparison of its large files with their digests


@dataclass(frozen=True)
class _Views:
    far: str  # ranks that do not see it, in words; "" for none
    sharers: tuple[tuple[int, int], ...]  # runs of ranks, the first and the last of each: few, however many ranks


@dataclass(frozen=True)
class _Sent:
    """What rank 0 sends of a checkpoint to those who do not see it, and what they call it when they ask for tensors."""

    serving_id: str = ""
    manifest: str = ""
    document: Mapping[str, Any] = field(default_factory=dict)


def checkpoint_facts(held: OpenCheckpoint) -> CheckpointFacts:
    """What tells the checkpoint from all others."""
    place = () if is_foreign(held.manifest) else _manifest_place(held)  # else its identity tells it
    return CheckpointFacts(str(held.location), held.identity, place)


def open_to_all(
    point: ResumePoint | None,
    found: CheckpointFacts,
    place_called: Callable[[str], Place],
    ranks: Ranks,
    stack: ExitStack,
    deep: bool,
    late: bool = False,
) -> ResumePoint:
    """The checkpoint that rank 0 has open as `point`, by its facts `found`, on every rank until the stack ends.

    A rank sees it that finds the same files at the same path or URL, or a copy that is whole (`deep`: by its digests);
    `place_called` opens these. For one that does not, rank 0 reads, in a thread. `late`: digests are still to be
    compared, a task that ranks which see the same files share. Collective.
    """
    place = place_called(found.path)
    here, _ = try_action(lambda: point or _open_copy(found, place, stack, deep, late))
    sight, kinds = _Sight(here is not None, here is not None and bool(here.tensors.proofs)), (_Sight, _Views)
    views, _ = decide_together(ranks, "opening the checkpoint of resume()", sight, _who_sees_it, kinds)
    sharers = [rank for first, last in views.sharers for rank in range(first, last + 1)]
    if here is not None and ranks.rank in sharers:
        here.tensors.take_share(sharers.index(ranks.rank), len(sharers))
    far = views.far
    if not far:
        return cast("ResumePoint", here)
    mine, error = try_action(lambda: _Sent() if point is None else _checkpoint_to_send(point))
    sent = hear_leader(ranks, "sending the checkpoint of resume()", _Sent, mine, error)
    if point is not None:
        again = _open_again(point, stack)  # the thread's own: open files are of one thread
        stack.enter_context(serve_reads(sent.serving_id, again.read, ranks))
    return _remote_checkpoint(found, place, sent, ranks, far) if here is None else replace(here, served=far)


def _who_sees_it(answers: Sequence[_Sight]) -> _Views:
    far = rank_numbers([rank for rank, answer in enumerate(answers) if not answer.sees])
    runs = [(shares, [*some]) for shares, some in groupby(range(len(answers)), lambda rank: answers[rank].shares)]
    return _Views(far, tuple((run[0], run[-1]) for shares, run in runs if shares))


@contextmanager
def serve_reads(word: str, read: Read, ranks: Ranks) -> Iterator[None]:
    """On rank 0: answer from a thread what other ranks ask about the checkpoint they call `word`, while this lasts.

    `read` is called in that thread.
    """
    store = current_ranks(ranks.timeout_seconds, _LANE).store
    with beside_thread("ft_ckpt-serve", partial(_answer_requests, store, word, read)):
        yield


@dataclass(eq=False)
class RemoteFile:
    """The tensors of a part that rank 0 reads for this rank; a `TensorFile`."""

    part: str  # its folder
    specs: Mapping[str, Spec]
    word: str  # that rank 0 answers to
    ranks: Ranks
    store: Any = field(init=False)

    def __post_init__(self) -> None:
        self.store = current_ranks(self.ranks.timeout_seconds, _LANE).store

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Flat elements [start, stop) of the tensor. Raises RankError when rank 0 cannot read them, or is gone."""
        spec = self.specs[name]
        item = ITEM_BYTES[spec.dtype]
        stop = spec.size_bytes // item if stop is None else stop
        found = torch.empty((stop - start) * item, dtype=torch.uint8)
        asked: deque[tuple[str, int, int]] = deque()
        step = max(1, _PIECE_BYTES // item)
        for low in range(start, stop, step):
            high = min(low + step, stop)
            key = self._send_request([self.part, name, low, high])
            asked.append((key, (low - start) * item, (high - start) * item))
            if len(asked) == _AHEAD:
                self._receive_answer(asked.popleft(), found)
        while asked:
            self._receive_answer(asked.popleft(), found)
        return found.view(dtype_of(spec.dtype))

    def close(self) -> None:
        """Nothing is open here."""

    def _send_request(self, what: list[Any]) -> str:
        number = self.store.add(_store_key(self.word, "asked"), 1)
        self.store.set(_store_key(self.word, f"ask/{number}"), json.dumps(what))
        return _store_key(self.word, f"answer/{number}")

    def _receive_answer(self, asked: tuple[str, int, int], found: Tensor) -> None:
        key, start, stop = asked
        while not _wait_for_key(self.store, key):
            self.ranks.check_peers()
        answer = self.store.get(key)
        self.store.delete_key(key)
        if len(answer) != stop - start + 1 or answer[-1:] != _DONE:
            raise RankError(f"rank 0, which reads the checkpoint for this rank: {answer[:-1].decode(errors='replace')}")
        ctypes.memmove(found.data_ptr() + start, answer, stop - start)


def _open_copy(found: CheckpointFacts, place: Place, stack: ExitStack, deep: bool, late: bool) -> ResumePoint | None:
    """The checkpoint as this rank sees it; None when it is another one, or a copy that is damaged."""
    if accelerate_folder_at(place) is not None:
        there = open_accelerate_folder(Path(found.path), stack)
        return there if checkpoint_facts(there.checkpoint) == found else None
    with ExitStack() as trial:
        here = trial.enter_context(open_checkpoint(place, compares=False))
        is_rank_0s = _manifest_place(here) == found.place
        if here.identity == found.identity and (is_rank_0s or not here.find_problems(deep)):
            point = open_resume_point(here, trial, here.late_proofs() if is_rank_0s and late else ())
            stack.push(trial.pop_all())
            return point
    return None


def _open_again(point: ResumePoint, stack: ExitStack) -> StoredTensors:
    """The tensors of `point`, in files of their own."""
    if is_foreign(point.checkpoint.manifest):
        return open_accelerate_folder(point.checkpoint.path, stack).tensors
    again = StoredTensors(point.checkpoint)
    stack.callback(again.close)
    return again


def _manifest_place(held: OpenCheckpoint) -> tuple[int, ...]:
    """See `CheckpointFacts`; nothing in a bucket, of which there is one however many machines look at it."""
    if not isinstance(held.origin, LocalStore):
        return ()
    with damaged_input(held.path):
        status = (held.path / MANIFEST_NAME).stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _checkpoint_to_send(point: ResumePoint) -> _Sent:
    return _Sent(uuid.uuid4().hex, manifest_to_json(point.checkpoint.manifest), point.document)


def _remote_checkpoint(found: CheckpointFacts, place: Place, sent: _Sent, ranks: Ranks, far: str) -> ResumePoint:
    """The checkpoint for a rank that does not see it, which has been `sent` all but the tensors: rank 0 reads these."""
    manifest = manifest_from_json(sent.manifest, found.path)
    files: dict[str, TensorFile] = {}
    for part in manifest.parts:
        specs = {tensor.name: Spec(tensor.name, tensor.shape, tensor.dtype) for tensor in part.tensors}
        files[part.path] = RemoteFile(part.path, specs, sent.serving_id, ranks)
    held = OpenCheckpoint(place.folder, place.folder, manifest, found.identity)
    return ResumePoint(held, dict(sent.document), StoredTensors(held, files.__getitem__), far)


def _answer_requests(store: Any, word: str, read: Read, done: threading.Event) -> None:
    number = 1
    while not done.is_set():
        key = _store_key(word, f"ask/{number}")
        if not _wait_for_key(store, key):
            continue
        asked = json.loads(store.get(key))
        data, error = try_action(lambda: read(*asked))  # noqa: B023 - called at once
        store.set(_store_key(word, f"answer/{number}"), _encode_failure(error) if error else _encode_answer(data))
        store.delete_key(key)
        number += 1


def _encode_answer(data: Tensor) -> bytes:
    return data.contiguous().view(-1).view(torch.uint8).numpy().tobytes() + _DONE


def _encode_failure(error: BaseException) -> bytes:
    return (str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}").encode() + _FAILED


def _wait_for_key(store: Any, key: str) -> bool:
    with suppress(RuntimeError):  # DistStoreError: time is up
        store.wait([key], _WAIT)
        return True
    return False


def _store_key(word: str, name: str) -> str:
    return f"ft_ckpt/{_LANE}/{word}/{name}"


@dataclass(frozen=True)
class _Choice:
    """What rank 0 resumes from, of what it was asked for."""

    mode: str
    found: CheckpointFacts | None = None  # None: the run begins afresh
    branch: str | None = None  # the name of the run that begins there, if it is another
    late: bool = False  # digests are compared while the files are read


def open_agreed(wanted: Wanted, ranks: Ranks, stack: ExitStack) -> tuple[ResumePoint | None, str | None]:
    """The checkpoint that rank 0 chooses, open on every rank as long as the stack; and the name of the run that begins
    there, if it is another. Collective.

    Raises what `open_chosen` does, RankError when another rank failed.
    """
    point: ResumePoint | None
    chosen, error = ranks.attempt(lambda: _choose_and_open(wanted, stack) if ranks.leads else None)
    point, choice = chosen or (None, _Choice(str(wanted.mode)))
    choice = hear_leader(ranks, "resume()", _Choice, choice, error, same=("mode",))
    if choice.found is not None and ranks.size > 1:
        point = open_to_all(point, choice.found, wanted.called, ranks, stack, wanted.deep, choice.late)
    return point if point is None else replace(point, is_proved_late=choice.late), choice.branch


def _choose_and_open(wanted: Wanted, stack: ExitStack) -> tuple[ResumePoint, _Choice] | None:
    listings: list[Listing] = []
    for folder in wanted.places.folders:
        recover_all(folder)  # of what saves have left that were killed
        listings.append(_list_for(wanted, folder))
    infos = [info for listed in listings for info in listed.found]
    if wanted.places.directory is not None:
        infos = in_run_order(infos)
        warn_of_others(wanted.places.directory, infos, wanted.mode)
    point = open_chosen(wanted, infos, stack)
    if point is None:
        if wanted.mode == "auto":
            _refuse_damaged(listings)
        return None
    branch = branch_run_id(wanted, point.checkpoint, infos)
    return point, _Choice(str(wanted.mode), checkpoint_facts(point.checkpoint), branch, bool(point.tensors.proofs))


def _list_for(wanted: Wanted, folder: Place) -> Listing:
    """The checkpoints in a folder of the run; all manifests are needed to find the newest."""
    if wanted.mode in ("auto", "must"):
        return list_readable(folder)
    listed = list_checkpoints(folder)
    listed.warn_left_out()
    return listed


def _refuse_damaged(listings: Iterable[Listing]) -> None:
    """Raise for damaged manifests: a run does not begin afresh beside what may be its own."""
    for listed in listings:
        if listed.damaged:
            told = listing([str(error) for error in listed.damaged.values()])
            raise ManifestError(f"{told}; there is nothing else to resume from: move it away to begin afresh")
