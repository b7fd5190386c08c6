"""The way back into a run: choose a checkpoint, put every object's state back, and say of each how that went.

Each rank reads what it holds, by ranges, from plain tensor files and one JSON document: nothing is executed, and the
number of ranks and their wrappers may be others than those that saved.
"""

import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ft_ckpt import optimizers
from ft_ckpt.bases import differences_of_base
from ft_ckpt.catalog import CheckpointInfo, discover, read_manifest
from ft_ckpt.disk import local_path
from ft_ckpt.engines import Source
from ft_ckpt.errors import (
    CheckpointError,
    CorruptError,
    LoadError,
    ManifestError,
    NotACheckpointError,
    SelectionError,
    damaged_input,
    listing,
)
from ft_ckpt.fan_out import Filler, each_reads
from ft_ckpt.fill import Wanted, fill
from ft_ckpt.formats import TensorFile, dual, hdf5
from ft_ckpt.holdings import is_dtensor
from ft_ckpt.items import ENGINE, ExtraState, Item, Key, labelled, manner, of_model, tied
from ft_ckpt.manifest import Manifest
from ft_ckpt.opening import OpenCheckpoint, open_checkpoint
from ft_ckpt.replicas import WEIGHTS, own_name
from ft_ckpt.training import DOCUMENT_NAME, DOCUMENT_VERSION, FOLDER, Document, source_of, tensors_of
from ft_ckpt.tree import unflatten
from ft_ckpt.tree_json import decode
from ft_ckpt.typed_json import reader_of


@dataclass(frozen=True)
class Restored:
    """What became of one item: `status` is "restored", "absent" (on one side) or "failed"; `detail` says why."""

    name: str
    status: str
    detail: str = ""


@dataclass(frozen=True)
class RestoreReport:
    """What a resume brought back, item by item, and how the run differs from the one that saved."""

    path: Path | None = None  # None: nothing was resumed, the run began afresh
    items: tuple[Restored, ...] = ()
    differences: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def problems(self) -> tuple[str, ...]:
        """A line for each item that was not restored."""
        return tuple(f"{item.name}: {item.status}: {item.detail}" for item in self.items if item.status != "restored")


@contextmanager
def chosen(directory: Path | None, mode: str, deep: bool = True) -> Iterator[OpenCheckpoint | None]:
    """The checkpoint to resume from, open while the block runs; None to start afresh.

    What was compared with its manifest are the open files that are then read.

    `mode`: "never"; "auto", the newest that is whole and resumable, if any; "must", the newest, or an error; else a
    checkpoint's name in `directory` or its path. `deep` compares the digests of all its files. Raises
    NotACheckpointError when there is none, CorruptError naming its damaged files and the newest whole one.
    """
    if mode == "never":
        yield None
        return
    with ExitStack() as stack:
        yield _choose(directory, mode, deep, stack)


def _choose(directory: Path | None, mode: str, deep: bool, stack: ExitStack) -> OpenCheckpoint | None:
    if mode in ("auto", "must"):
        candidates = [] if directory is None else [i for i in reversed(discover(directory)) if is_resumable(i.manifest)]
    else:
        named = _named(directory, mode)
        if not named.exists():
            there = [info.path.name for info in discover(directory)] if directory is not None else []
            raise NotACheckpointError(
                f"{named}: is not there; {directory} has {listing(there, ', ') or 'none'}. Expected 'auto', 'must', "
                "'never', the name of one of these, or a path"
            )
        if not is_resumable(read_manifest(named)):
            raise NotACheckpointError(f"{named}: holds weights and no training state; ft_ckpt.load_model reads them")
        candidates = [CheckpointInfo(named, read_manifest(named))]
    for number, info in enumerate(candidates):
        held, problems = _opened(info.path, deep, stack)
        if held is not None:
            return held
        if mode != "auto":
            older = next((one.path for one in candidates[number + 1 :] if _opened(one.path, deep, stack)[0]), None)
            advice = f"the newest whole one is {older}" if older else "there is no older one that is whole"
            raise CorruptError(f"{info.path}: {listing(list(problems))}; {advice}")
        warnings.warn(f"{info.path}: damaged, trying an older one: {listing(list(problems))}", stacklevel=2)
    if mode == "must":
        raise NotACheckpointError(f"{directory}: no checkpoint with training state in it; use resume('auto') to begin")
    return None


def _named(directory: Path | None, name: str) -> Path:
    """The run's own checkpoint of that name; what has a separator in it, or is none of the run's, is a path."""
    own = None if directory is None or os.sep in name else directory / name
    return own if own is not None and (own.exists() or not Path(name).exists()) else local_path(name)


def is_resumable(manifest: Manifest) -> bool:
    """Whether the checkpoint has training state."""
    return any(part.kind == "state" for part in manifest.parts)


def read_document(path: Path) -> Document:
    """The JSON half of the training state of checkpoint `path`. Raises CorruptError when it cannot be read."""
    file = path / FOLDER / DOCUMENT_NAME
    with damaged_input(f"{file}; resume from another checkpoint"):
        document: Document = json.loads(file.read_text(encoding="utf-8"))
        version = document["version"]
        if version > DOCUMENT_VERSION:
            raise CorruptError(
                f"{file}: training state version {version}, this ft_ckpt reads up to {DOCUMENT_VERSION}; upgrade"
            )
        known = reader_of(_Known)(document)
        if not known.ranks or any(len(place) != 2 for place in known.weights.values()):
            raise CorruptError(
                f"{file}: of no rank, or with weights that have no place; resume from another checkpoint"
            )
    return document


@dataclass(frozen=True)
class _Tree:
    tree: Any


@dataclass(frozen=True)
class _Known:
    """What every document has; it is compared where it is read, so that what reads parts of it can rely on them."""

    version: int
    weights: Mapping[str, tuple[str, ...]]
    items: Mapping[str, Mapping[str, Any]]
    ranks: tuple[Mapping[str, _Tree], ...]
    progress: Mapping[str, Any]
    run_id: str


class Stored:
    """The tensor files of one checkpoint, opened when first needed; tensors by the folder of their part and name."""

    def __init__(self, held: OpenCheckpoint) -> None:
        self._held, parts = held, held.manifest.parts
        self.is_adapter = held.manifest.kind == "adapter"
        self._formats = {part.path: part.format for part in parts}
        self._files = {(part.path, tensor.name): tensor.file for part in parts for tensor in part.tensors}
        self._open: dict[str, TensorFile] = {}

    def file(self, part: str, name: str) -> TensorFile:
        """The file that holds the tensor `name` of the part in folder `part`. Raises LoadError when none does."""
        place = self._files.get((part, name))
        if place is None:
            raise LoadError(f"{name}: not among the tensors of the checkpoint {self._held.path}")
        if place not in self._open:
            opener: Callable[[Path], TensorFile] = hdf5.open_file if self._formats[part] == "h5" else dual.open_file
            self._open[place] = opener(self._held.folder / place) if self._held.far is None else self._held.far(part)
        return self._open[place]

    def names(self, prefix: str) -> frozenset[str]:
        """Names of the training state's tensors that begin with `prefix`, without it."""
        return frozenset(n[len(prefix) :] for part, n in self._files if part == FOLDER and n.startswith(prefix))

    def read(self, part: str, name: str, start: int, stop: int) -> Tensor:
        """Flat elements [start, stop) of a tensor, on the host."""
        return self.file(part, name).read(name, start, stop)

    def state(self, name: str) -> Tensor:
        """The tensor `name` of the training state, whole, on the host."""
        file = self.file(FOLDER, name)
        return file.read(name).view(file.specs[name].shape)

    def close(self) -> None:
        """Let go of the files."""
        for file in self._open.values():
            file.close()


@contextmanager
def opened(held: OpenCheckpoint) -> Iterator[Stored]:
    """The tensor files of a checkpoint while the block runs."""
    stored = Stored(held)
    try:
        yield stored
    finally:
        stored.close()


def restore_weights(
    found: Mapping[Key, Source], document: Document, stored: Stored, fill_all: Filler = each_reads
) -> Restored:
    """Every tensor of the model that is saved, in place, on each rank its block.

    An adapter's checkpoint lacks the frozen parameters of its base, and nothing else.
    """
    weights, known = document["weights"], of_model(found)
    unknown = [name for name in weights if name not in known]
    if unknown:
        return Restored("weights", "failed", f"{listing(unknown, ', ')}: in the checkpoint, not in the model")

    def collect() -> list[Wanted]:
        once = {known[name].identity: (known[name], *place) for name, place in reversed(weights.items())}
        return [(source, stored.file(part, name), name) for source, part, name in reversed(once.values())]

    left = [name for name, source in known.items() if name not in weights and not _is_elsewhere(source, stored)]
    if left:
        return Restored("weights", "failed", f"{listing(left, ', ')}: in the model, not in the checkpoint")
    return _attempt("weights", lambda: fill_all("weights", collect))


def compare_base(model: nn.Module, document: Document, held: OpenCheckpoint, rank: int) -> list[Restored]:
    """Whether the base of the run's adapters, where the checkpoint is without it, is the one they were trained on."""
    compared, problems = differences_of_base(model, held.manifest.parts, document["weights"], rank)
    if problems:
        detail = f"not the base that the adapters were trained on ({listing(problems)})"
        return [Restored("base", "failed", detail)]
    return [Restored("base", "restored", f"not in the checkpoint; {compared} tensors compared")] if compared else []


def restore_items(
    items: Sequence[Item],
    found: Mapping[Key, Source],
    document: Document,
    stored: Stored,
    rank: int,
    fill_all: Filler = each_reads,
) -> list[Restored]:
    """The state of each item; what only the checkpoint or only this run has is "absent"."""
    outcomes = []
    for item in items:
        if item.name not in document["items"]:
            if item.name == ENGINE:
                continue  # counts of DeepSpeed's, which begin anew where the run comes from elsewhere
            if isinstance(item.value, ExtraState) and item.value.state_dict().keys() <= document["weights"].keys():
                continue  # an earlier version kept them with the weights
            outcomes.append(Restored(item.name, "absent", "not in the checkpoint"))
            continue
        entry = own(document, rank).get(item.name) or document["items"][item.name]
        prefix = f"rank-{rank}/{item.name}" if item.name in own(document, rank) else item.name
        alike = not any(item.name in one for one in document["ranks"])  # else each rank reads for itself
        give = _Give(prefix, stored, fill_all if alike else each_reads)
        outcomes.append(_attempt(item.name, lambda: _restore(item, entry, found, give)))  # noqa: B023 - called at once
    names = {ENGINE, *(item.name for item in items)}
    gone = [name for name in document["items"] if name not in names]
    return outcomes + [Restored(name, "absent", "in the checkpoint, not in this run") for name in gone]


def restore_apart(
    items: Sequence[Item], found: Mapping[Key, Source], document: Document, stored: Stored, rank: int, world_size: int
) -> tuple[list[Restored], list[str]]:
    """What ranks had come apart in, each rank its own; and in words what cannot be put back so.

    Everything has rank 0's before this, and keeps it where the number of ranks is another, or ranks hold parts now.
    """
    apart: dict[str, list[int]] = document.get("apart", {})
    if not apart:
        return [], []
    live = _live(items, found, document)
    possible = {name for name, source in live.items() if _is_own(source) and world_size == len(document["ranks"])}
    lost = [name.removeprefix(f"{WEIGHTS}/") for name in apart if name not in possible]
    told = [f"{listing(lost, ', ')}: not the same on all ranks that saved, rank 0's on all now"] if lost else []

    def collect() -> list[Wanted]:
        mine = [(live[name], own_name(name, rank)) for name, odd in apart.items() if rank in odd and name in possible]
        return [(source, stored.file(FOLDER, name), name) for source, name in mine]

    return ([_attempt("replicas", lambda: each_reads("replicas", collect))] if possible & apart.keys() else []), told


def _is_own(source: Source) -> bool:
    """Whether a rank may have a tensor of its own there, in memory that is the model's."""
    return source.holding.alike and not source.is_added


def _live(items: Sequence[Item], found: Mapping[Key, Source], document: Document) -> dict[str, Source]:
    """The tensors of a run by the names of `replicas`."""
    live = {f"{item or WEIGHTS}/{name}": source for (item, name), source in found.items()}
    for item in items:
        if item.kind == "optimizer" and item.name in document["items"]:
            description = document["items"][item.name]["optimizer"]
            state = manner(item).captured(optimizers.inner(item.value), description, labelled(found))
            live |= {f"{item.name}/{name}": source for name, source in state.items()}
    return live


def own(document: Document, rank: int) -> Document:
    """What the document has of this rank alone; nothing for a rank that was not there."""
    ranks: list[Document] = document["ranks"]
    return ranks[rank] if rank < len(ranks) else {}


def own_tree(document: Document, stored: Stored, rank: int, name: str) -> Any:
    """The object `name` that the rank stored for itself; None when there is none."""
    entry = own(document, rank).get(name)
    return None if entry is None else _tree(entry, f"rank-{rank}/{name}", stored)


def _opened(path: Path, deep: bool, stack: ExitStack) -> tuple[OpenCheckpoint | None, tuple[str, ...]]:
    """The checkpoint at `path`, open as long as the stack; or None, and what is wrong with it."""
    with ExitStack() as trial:
        try:
            held = trial.enter_context(open_checkpoint(path))
            found = held.problems(deep)
            if not found:
                read_document(held.folder)
                stack.push(trial.pop_all())
                return held, ()
        except (ManifestError, CorruptError, OSError) as error:
            return None, (str(error),)
    return None, found


def _is_elsewhere(source: Source, stored: Stored) -> bool:
    """Whether a tensor that is not among a checkpoint's weights need not be."""
    return source.is_added or (stored.is_adapter and source.is_parameter and not source.trainable)


def _attempt(name: str, action: Callable[[], Any]) -> Restored:
    try:
        detail = action()
    except Exception as error:  # noqa: BLE001 - every item is tried, and all failures are told together
        text = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        return Restored(name, "failed", text)
    return Restored(name, "restored", detail or "")


@dataclass(frozen=True)
class _Give:
    """Stored tensors of one item, for the sources that want them."""

    prefix: str
    stored: Stored
    fill_all: Filler

    def wanted(self, source: Source, name: str) -> Wanted:
        """What `fill_all` takes."""
        stored_name = f"{self.prefix}/{name}"
        return source, self.stored.file(FOLDER, stored_name), stored_name

    def now(self, source: Source) -> None:
        """Fill the source at once."""
        fill(*self.wanted(source, source.name))


def _restore(item: Item, entry: Document, found: Mapping[Key, Source], give: _Give) -> str:
    notes: list[str] = []
    if item.kind == "optimizer":

        def state() -> list[Wanted]:
            sources: list[Source] = []
            give_back = manner(item).restore
            known = labelled(found)
            notes.extend(give_back(optimizers.inner(item.value), entry["optimizer"], known, give.now, sources.append))
            return [give.wanted(source, source.name) for source in sources]

        give.fill_all(item.name, state)
    elif item.kind == "model":
        give.fill_all(item.name, lambda: _whole_model(of_model(found, item.name), give))
    else:
        item.value.load_state_dict(_tree(entry, give.prefix, give.stored, item.value))
    return "; ".join(notes)


def _whole_model(own: Mapping[str, Source], give: _Give) -> list[Wanted]:
    """Every tensor of a further model, tied ones under the name that is stored. Raises LoadError for what differs."""
    names = give.stored.names(f"{give.prefix}/")
    groups = {next((name for name in group if name in names), group[0]): group for group in tied(own)}
    problems = [f"{name}: in the model, not in the checkpoint" for name in groups if name not in names]
    problems += [f"{name}: in the checkpoint, not in the model" for name in sorted(names) if name not in own]
    if problems:
        raise LoadError(listing(problems))
    return [give.wanted(own[name], name) for name in groups]


def _tree(entry: Document, prefix: str, stored: Stored, like: Any = None) -> Any:
    """The object that `entry` describes. Tensors that `like` has cut over the ranks are made and read in its way."""
    cut = _cut_tensors(like)

    def tensor(index: int) -> Any:
        name = f"{prefix}/{index}"
        if index not in cut:
            return stored.state(name)
        fresh = torch.empty_like(cut[index])
        fill(source_of(name, fresh), stored.file(FOLDER, name), name)
        return fresh

    return unflatten(decode(entry["tree"]), tensor, lambda index: stored.state(f"{prefix}/{index}").numpy())


def _cut_tensors(like: Any) -> dict[int, Tensor]:
    """The distributed tensors in the state of an object as it is now, by their place in its tree."""
    if like is None:
        return {}
    with suppress(SelectionError):  # what it holds before it is loaded may be of any kind
        tensors = tensors_of(like.state_dict())
        return {index: tensor for index, tensor in enumerate(tensors) if is_dtensor(tensor)}
    return {}
