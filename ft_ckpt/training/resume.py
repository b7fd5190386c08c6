"""The way back into a run: every object's state is put back, and of each it is said how that went.

Each rank reads what it holds: the number of ranks and their wrappers may be others than those that saved.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from ft_ckpt.checkpoint.open_checkpoint import OpenCheckpoint
from ft_ckpt.distributed.agreement import Values
from ft_ckpt.distributed.broadcast import Filler, each_reads
from ft_ckpt.distributed.ranks import Ranks
from ft_ckpt.distributed.read_shards import WantedTensor, check_all, fill_tensor
from ft_ckpt.distributed.replicas import WEIGHTS, own_name, own_part, place_of
from ft_ckpt.distributed.source import Source
from ft_ckpt.errors import CheckpointError, CorruptError, LoadError, RanksDisagreeError, UnreadableError, listing
from ft_ckpt.model.base_model import differences_of_base
from ft_ckpt.model.selection import module_at
from ft_ckpt.model.settings import adapter_settings, differences_of_live
from ft_ckpt.storage.digests import PassingProblem
from ft_ckpt.storage.file_proof import PartDigests, compare_digests, read_late
from ft_ckpt.storage.place import Place
from ft_ckpt.training.exchange import decide_together
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
from ft_ckpt.training.rank_descriptions import description_of_rank
from ft_ckpt.training.state import FOLDER, Document
from ft_ckpt.training.state_files import ResumePoint, StoredTensors, entries_of_rank, tree_of


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
