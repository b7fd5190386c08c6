"""Restores the items of a run from an open checkpoint: model weights, optimizers, objects.

A failed item is reported (`Restored`), and the next one is tried. Each rank reads the elements that
it holds, so the number of ranks and the wrappers of the models may differ from those of the saved
run. A source describes one tensor of a model or optimizer: name, shape, dtype, and which elements
this rank holds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ft_ckpt.errors import CheckpointError, LoadError, listing, shown
from ft_ckpt.ranks.moving import WEIGHTS, Filler, WantedTensor, check_all, each_reads, fill_tensor
from ft_ckpt.ranks.sharding import Source
from ft_ckpt.runs.items import Item, Key, labelled_sources, model_sources, optimizer_of, tied_names
from ft_ckpt.runs.optimizers import settings_by_rank
from ft_ckpt.runs.resume.opening import ResumePoint
from ft_ckpt.runs.state import FOLDER, Document, Restored, StoredTensors, entries_of_rank, tree_of


def check_only(_what: str, collect: Callable[[], list[WantedTensor]]) -> None:
    """Compare the tensors with the stored ones, and read none.

    This is a `Filler`: functions that restore an item call it in the place of one that reads.
    """
    check_all(collect())


def restore_weights(
    sources: Mapping[Key, Source], resume_point: ResumePoint, fill_all: Filler = each_reads
) -> Restored:
    """Fill every saved tensor of the model in place; each rank fills its elements.

    The outcome is "failed" if the names differ. Every tensor of the model must be stored, except
    the frozen base under the adapter in an adapter's checkpoint.
    """
    weights = resume_point.document["weights"]
    stored = resume_point.tensors
    live = model_sources(sources)
    unknown = [name for name in weights if name not in live]
    if unknown:
        detail = f"{listing(unknown, ', ')}: in the checkpoint, not in the model"
        return Restored("weights", "failed", detail)
    missing = [name for name in _required_weights(live, stored) if name not in weights]
    if missing:
        detail = f"{listing(missing, ', ')}: in the model, not in the checkpoint"
        return Restored("weights", "failed", detail)
    collect = partial(_wanted_weights, weights, live, stored)
    return try_restore("weights", lambda: fill_all("weights", collect))


def _required_weights(live: Mapping[str, Source], stored: StoredTensors) -> list[str]:
    """Return the names of the model's tensors that must be in the checkpoint.

    Two kinds need not be there: state that a module adds to its state dict, which is an item of its
    own, and frozen parameters if the checkpoint is of an adapter, because they are in the base.
    """
    required = []
    for name, source in live.items():
        is_of_base = stored.is_adapter and source.is_parameter and not source.trainable
        if not source.is_added and not is_of_base:
            required.append(name)
    return required


def _wanted_weights(
    weights: Mapping[str, Sequence[str]], live: Mapping[str, Source], stored: StoredTensors
) -> list[WantedTensor]:
    """Return the tensors to read. A tensor with several tied names is read once."""
    wanted = []
    seen: set[int] = set()
    for name, (part, stored_name) in weights.items():
        source = live[name]
        if source.key not in seen:
            seen.add(source.key)
            file = stored.file_of(part, stored_name)
            wanted.append(WantedTensor(source, source.local, file, stored_name))
    return wanted


def restore_items(
    items: Sequence[Item],
    sources: Mapping[Key, Source],
    resume_point: ResumePoint,
    rank: int,
    fill_all: Filler = each_reads,
) -> list[Restored]:
    """Restore each of `items` that the checkpoint has, and return their outcomes.

    An item that differed between the ranks of the saved run is read from this rank's own entries.
    """
    document = resume_point.document
    rank_entries = entries_of_rank(document, rank)
    outcomes = []
    for item in items:
        if item.name not in document["items"]:
            continue
        entry = document["items"][item.name]
        prefix = item.name
        if item.name in rank_entries:
            entry = rank_entries[item.name]
            prefix = f"rank-{rank}/{item.name}"
        filler = fill_all
        if any(item.name in trees for trees in document["ranks"]):
            filler = each_reads  # because ranks have different values
        stored = StoredItem(prefix, resume_point.tensors, filler)
        outcomes.append(try_restore(item.name, partial(restore_item, item, entry, sources, stored)))

    return outcomes


def replica_differences(document: Document) -> list[str]:
    """Name what differed between the ranks of the saved run and is now the same on all of them.

    Returns at most one sentence.
    """
    # ft_ckpt 0.3 and earlier wrote "apart", later versions write "differing".
    names = [*document.get("apart", {}), *document.get("differing", [])]
    differing = [name.removeprefix(f"{WEIGHTS}/") for name in names]
    for item, entry in document["items"].items():
        description = entry.get("optimizer", {})
        differing += [f"{item}: {setting}" for setting in settings_by_rank(description)]
        if "own" in description:  # ft_ckpt 0.3 and earlier wrote it
            differing.append(f"{item}: settings of rank(s) {', '.join(description['own'])}")
    if not differing:
        return []
    names_text = listing(differing, ", ")
    return [f"{names_text}: not the same on all ranks that saved, all ranks now have rank 0's"]


def try_restore(name: str, action: Callable[[], Any]) -> Restored:
    """Call `action`, which restores the item `name`, and return the outcome.

    The result of `action` is the detail of the outcome, or None. Its error makes the outcome
    "failed".
    """
    try:
        detail = action()
    except Exception as error:  # noqa: BLE001 - every item is tried, and all failures are reported together
        text = str(error) if isinstance(error, CheckpointError) else shown(error)
        return Restored(name, "failed", text)
    return Restored(name, "restored", detail or "")


@dataclass(frozen=True)
class StoredItem:
    """The stored tensors of one item.

    Their names in the checkpoint begin with `prefix`. `fill_all` reads several of them.
    """

    prefix: str
    tensors: StoredTensors
    fill_all: Filler

    def wanted(self, source: Source, name: str) -> WantedTensor:
        """Return the request to read the stored tensor `name` of the item into `source`."""
        stored_name = f"{self.prefix}/{name}"
        file = self.tensors.file_of(FOLDER, stored_name)
        return WantedTensor(source, source.local, file, stored_name)

    def fill(self, source: Source) -> None:
        """Read this rank's elements of `source` now."""
        fill_tensor(self.wanted(source, source.name))


def restore_item(
    item: Item, entry: Document, sources: Mapping[Key, Source], stored: StoredItem
) -> str:
    """Restore one item from its `entry` in the document.

    Returns notes for the report, or "". Raises LoadError if the item does not fit, and what its
    `load_state_dict` raises.
    """
    if item.kind == "optimizer":
        return _restore_optimizer(item, entry["optimizer"], labelled_sources(sources), stored)
    if item.kind == "model":
        collect = partial(_wanted_of_model, model_sources(sources, item.name), stored)
        stored.fill_all(item.name, collect)
        return ""
    item.value.load_state_dict(tree_of(entry, stored.prefix, stored.tensors, item.value))
    return ""


def _restore_optimizer(
    item: Item, description: Document, labels: Mapping[str, Source], stored: StoredItem
) -> str:
    notes: list[str] = []

    def collect() -> list[WantedTensor]:
        """Restore the numbers and settings, and return the tensors that are read afterwards."""
        sources_to_fill: list[Source] = []
        optimizer = optimizer_of(item)
        notes.extend(
            optimizer.kind.restore(
                optimizer.optimizer, description, labels, stored.fill, sources_to_fill.append
            )
        )
        return [stored.wanted(source, source.name) for source in sources_to_fill]

    stored.fill_all(item.name, collect)
    return "; ".join(notes)


def _wanted_of_model(live: Mapping[str, Source], stored: StoredItem) -> list[WantedTensor]:
    """Return the requests to read every tensor of a model other than the main one.

    Tied tensors have several names, of which the checkpoint has one. Raises LoadError naming the
    tensors that only one side has.
    """
    stored_names = stored.tensors.state_names(f"{stored.prefix}/")
    names = []
    problems = []
    for names_of_tensor in tied_names(live):
        in_checkpoint = [name for name in names_of_tensor if name in stored_names]
        if in_checkpoint:
            names.append(in_checkpoint[0])
        else:
            problems.append(f"{names_of_tensor[0]}: in the model, not in the checkpoint")

    for name in sorted(stored_names):
        if name not in live:
            problems.append(f"{name}: in the checkpoint, not in the model")

    if problems:
        raise LoadError(listing(problems))
    return [stored.wanted(live[name], name) for name in names]
