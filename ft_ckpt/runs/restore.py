"""Restore the items of a run from an open checkpoint: model weights, optimizers, objects.

Each function reports per item (`Restored`) and raises only on errors that concern all of them. Each
rank reads the elements it holds: the number of ranks and their wrappers may differ from those of
the saved run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from ft_ckpt.errors import CheckpointError, LoadError, listing, shown
from ft_ckpt.model import adapter_settings, differences_of_base, differences_of_live, module_at
from ft_ckpt.ranks import (
    WEIGHTS,
    Filler,
    Ranks,
    Source,
    Values,
    WantedTensor,
    check_all,
    each_reads,
    fill_tensor,
)
from ft_ckpt.runs.items import (
    ENGINE,
    ExtraState,
    Item,
    Key,
    labelled_sources,
    model_sources,
    optimizer_of,
    tied_names,
)
from ft_ckpt.runs.state import (
    FOLDER,
    Document,
    ResumePoint,
    StoredTensors,
    entries_of_rank,
    settings_by_rank,
    tree_of,
)
from ft_ckpt.storage import Place


@dataclass(frozen=True)
class Restored:
    """The outcome of one item: `status` is "restored", "absent" (on one side) or "failed"; `detail`
    says why.
    """

    name: str
    status: str
    detail: str = ""


@dataclass(frozen=True)
class RestoreReport:
    """The outcome of a resume, item by item, and how the run differs from the one that saved."""

    path: Path | str | None = None
    """The checkpoint; None when nothing was resumed and the run began afresh."""
    items: tuple[Restored, ...] = ()
    """Each with its `name`, `status` ("restored", "absent" on one side, or "failed") and a `detail`
    that says why.
    """
    differences: tuple[str, ...] = ()
    """Settings in which this run differs from the one that saved."""
    notes: tuple[str, ...] = ()
    """Decisions of the resume that a reader should know."""
    requests: int = 0
    """Range requests of all ranks to a bucket; 0 for a checkpoint on a disk."""

    @property
    def problems(self) -> tuple[str, ...]:
        """A line for each item that was not restored."""
        return tuple(
            f"{item.name}: {item.status}: {item.detail}"
            for item in self.items
            if item.status != "restored"
        )


@dataclass(frozen=True, eq=False)
class LiveRun:
    """The run to restore: its items, and `found`, the tensors of its models."""

    accelerator: Any
    model: nn.Module
    items: Sequence[Item]
    found: Mapping[Key, Source]
    ranks: Ranks


def agree_on_outcomes(
    ranks: Ranks,
    what: str,
    outcomes: Sequence[Restored],
    requests: int = 0,
    error: BaseException | None = None,
) -> tuple[tuple[Restored, ...], int]:
    """One outcome per item, the first failure of any rank or else a success, and the sum of
    `requests`. Collective.

    `error` is this rank's own, as for `Ranks.agree`.
    """
    mine = {"items": [asdict(item) for item in outcomes], "requests": requests}
    merged = ranks.agree(what, mine, error, decide=_merge_outcomes).result
    return tuple(Restored(**item) for item in merged["items"]), merged["requests"]


def _merge_outcomes(values: Values) -> Document:
    merged: dict[str, Document] = {}
    for rank, value in enumerate(values):
        for item in value["items"]:
            known = merged.get(item["name"])
            if known is None or known["status"] == "restored" != item["status"]:
                where = f"on rank {rank}: " if rank and item["status"] != "restored" else ""
                merged[item["name"]] = {**item, "detail": where + item["detail"]}
    return {"items": [*merged.values()], "requests": sum(value["requests"] for value in values)}


def restore_weights(
    found: Mapping[Key, Source], point: ResumePoint, fill_all: Filler = each_reads
) -> Restored:
    """Fill every saved tensor of the model in place, each rank its elements.

    Every tensor of the model must be stored, except the frozen base of an adapter's checkpoint.
    """
    weights, stored, known = point.document["weights"], point.tensors, model_sources(found)
    unknown = [name for name in weights if name not in known]
    if unknown:
        return Restored(
            "weights", "failed", f"{listing(unknown, ', ')}: in the checkpoint, not in the model"
        )

    def wanted_tensors() -> list[WantedTensor]:
        # tied: once
        by_key = {
            known[name].key: (known[name], *place) for name, place in reversed(weights.items())
        }
        places = reversed(by_key.values())
        return [
            WantedTensor(source, source.local, stored.file_of(part, name), name)
            for source, part, name in places
        ]

    # Added state is stored as an item; the checkpoint of an adapter leaves frozen parameters to the
    # base.
    required = (n for n, s in known.items() if not s.is_added)
    if stored.is_adapter:
        required = (n for n in required if known[n].trainable or not known[n].is_parameter)
    if missing := [name for name in required if name not in weights]:
        return Restored(
            "weights", "failed", f"{listing(missing, ', ')}: in the model, not in the checkpoint"
        )
    return _try_restore("weights", lambda: fill_all("weights", wanted_tensors))


def find_misfits(live: LiveRun, point: ResumePoint) -> list[Restored]:
    """The items that cannot be restored, found without calling a `load_state_dict`.

    Changes nothing.
    """

    def only_check(_what: str, collect: Callable[[], list[WantedTensor]]) -> None:
        check_all(collect())

    stored_items = point.document["items"]
    outcomes = [restore_weights(live.found, point, only_check)]
    for item in live.items:
        if item.name in stored_items:
            entry, source = (
                stored_items[item.name],
                _StoredItem(item.name, point.tensors, only_check),
            )
            outcomes.append(_try_restore(item.name, lambda: _check_item(item, entry, live, source)))  # noqa: B023
        elif not _is_dispensable(item, point.document):
            outcomes.append(Restored(item.name, "absent", "not in the checkpoint"))
    known = {ENGINE, *(item.name for item in live.items)}
    outcomes += [
        Restored(name, "absent", "in the checkpoint, not in this run")
        for name in stored_items
        if name not in known
    ]
    return [item for item in outcomes if item.status != "restored"]


def _check_item(item: Item, entry: Document, live: LiveRun, stored: "_StoredItem") -> None:
    """Raise LoadError if the stored state is of another kind of item, or does not fit a model or
    optimizer.
    """
    key = item.kind if item.kind in ("optimizer", "model") else "tree"
    if key not in entry:
        raise LoadError(
            f"another kind of object in the checkpoint, expected the state of this {item.kind}"
        )
    if item.kind == "optimizer":
        module, optimizer = optimizer_of(item)
        module.check(optimizer, entry["optimizer"], labelled_sources(live.found))
    elif item.kind == "model":
        _restore_item(item, entry, live.found, stored)


def _is_dispensable(item: Item, document: Document) -> bool:
    """Whether the checkpoint of a run with `item` may lack it."""
    if item.name == ENGINE:
        return True  # DeepSpeed's counters start anew in a run that another engine saved
    # an earlier version stored the extra state with the weights
    return (
        isinstance(item.value, ExtraState)
        and item.value.state_dict().keys() <= document["weights"].keys()
    )


def compare_base(live: LiveRun, attribute: str | None, point: ResumePoint) -> list[Restored]:
    """Compare the base of the run's adapters, if the checkpoint lacks it, with the base they were
    trained on.
    """
    parts, weights = point.checkpoint.manifest.parts, point.document["weights"]
    compared, problems = differences_of_base(live.model, parts, weights, live.ranks.rank, attribute)
    if problems:
        detail = f"not the base that the adapters were trained on ({listing(problems)})"
        return [Restored("base", "failed", detail)]
    return (
        [Restored("base", "restored", f"not in the checkpoint; {compared} tensors compared")]
        if compared
        else []
    )


def compare_adapters(live: LiveRun, attribute: str | None, point: ResumePoint) -> list[Restored]:
    """A failed item if the settings of the run's adapters would change what the stored tensors
    compute.
    """
    held = point.checkpoint
    configs: Mapping[str, Any] = (
        getattr(module_at(live.model, attribute or ""), "peft_config", None) or {}
    )
    records = [
        record
        for record in held.manifest.parts
        if record.kind == "adapter" and record.adapter in configs
    ]

    def compare() -> None:
        stores = [
            (str(record.adapter), Place(held.store, record.path).folder) for record in records
        ]
        problems = [
            f"{name}: {field} is {found}, {expected} in the checkpoint"
            for name, store in stores
            for field, expected, found in differences_of_live(
                adapter_settings(store), configs[name]
            )
        ]
        if problems:
            raise LoadError(
                f"{listing(problems)}; make the adapter with the settings of the saved run"
            )

    outcome = _try_restore("adapter settings", compare)
    return [outcome] if outcome.status == "failed" else []


def restore_items(
    items: Sequence[Item], live: LiveRun, point: ResumePoint, fill_all: Filler = each_reads
) -> list[Restored]:
    """Restore each of `items` that the checkpoint has."""
    document, rank, outcomes = point.document, live.ranks.rank, []
    of_rank = entries_of_rank(document, rank)
    for item in items:
        if item.name not in document["items"]:
            continue
        entry = of_rank.get(item.name) or document["items"][item.name]
        prefix = f"rank-{rank}/{item.name}" if item.name in of_rank else item.name
        # then each rank reads its own
        differs = any(item.name in trees for trees in document["ranks"])
        stored = _StoredItem(prefix, point.tensors, each_reads if differs else fill_all)
        restore_item = partial(_restore_item, item, entry, live.found, stored)
        outcomes.append(_try_restore(item.name, restore_item))
    return outcomes


def note_on_replicas(document: Document) -> list[str]:
    """A note that names what was not the same on all ranks that saved: all ranks now have the
    stored values.
    """
    # of 0.3 and earlier; of later versions
    names = [*document.get("apart", {}), *document.get("differing", [])]
    differing = [name.removeprefix(f"{WEIGHTS}/") for name in names]
    for item, entry in document["items"].items():
        description = entry.get("optimizer", {})
        differing += [f"{item}: {setting}" for setting in settings_by_rank(description)]
        if "own" in description:  # of 0.3 and earlier
            differing.append(f"{item}: settings of rank(s) {', '.join(description['own'])}")
    if not differing:
        return []
    return [
        (
            f"{listing(differing, ', ')}: not the same on all ranks that saved, all "
            "ranks now have rank 0's"
        )
    ]


def _try_restore(name: str, action: Callable[[], Any]) -> Restored:
    try:
        detail = action()
    except Exception as error:  # noqa: BLE001 - every item is tried, and all failures are reported together
        text = str(error) if isinstance(error, CheckpointError) else shown(error)
        return Restored(name, "failed", text)
    return Restored(name, "restored", detail or "")


@dataclass(frozen=True)
class _StoredItem:
    """The stored tensors of one item."""

    prefix: str
    tensors: StoredTensors
    fill_all: Filler

    def wanted_by(self, source: Source, name: str) -> WantedTensor:
        stored_name = f"{self.prefix}/{name}"
        return WantedTensor(
            source, source.local, self.tensors.file_of(FOLDER, stored_name), stored_name
        )


def _restore_item(
    item: Item, entry: Document, found: Mapping[Key, Source], stored: _StoredItem
) -> str:
    notes: list[str] = []
    if item.kind == "optimizer":

        def wanted_state() -> list[WantedTensor]:
            sources: list[Source] = []
            module, optimizer = optimizer_of(item)
            labels = labelled_sources(found)
            fill_now = lambda source: fill_tensor(stored.wanted_by(source, source.name))  # noqa: E731
            notes.extend(
                module.restore(optimizer, entry["optimizer"], labels, fill_now, sources.append)
            )
            return [stored.wanted_by(source, source.name) for source in sources]

        stored.fill_all(item.name, wanted_state)
    elif item.kind == "model":
        stored.fill_all(
            item.name, lambda: _wanted_of_model(model_sources(found, item.name), stored)
        )
    else:
        item.value.load_state_dict(tree_of(entry, stored.prefix, stored.tensors, item.value))
    return "; ".join(notes)


def _wanted_of_model(own: Mapping[str, Source], stored: _StoredItem) -> list[WantedTensor]:
    """Every tensor of a further model, tied ones under their stored name.

    Raises LoadError naming what differs.
    """
    names = stored.tensors.state_names(f"{stored.prefix}/")
    groups = {
        next((name for name in group if name in names), group[0]): group
        for group in tied_names(own)
    }
    problems = [
        f"{name}: in the model, not in the checkpoint" for name in groups if name not in names
    ]
    problems += [
        f"{name}: in the checkpoint, not in the model" for name in sorted(names) if name not in own
    ]
    if problems:
        raise LoadError(listing(problems))
    return [stored.wanted_by(own[name], name) for name in groups]
