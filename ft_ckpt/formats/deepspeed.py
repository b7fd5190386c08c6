"""DeepSpeed checkpoints: assembles the weights from the files of all ranks, without DeepSpeed and without running code.

Source: the files of `save_checkpoint` under ZeRO-1, -2 and -3. Under 1 and 2 each rank has a partition of one flat
vector per parameter group, under 3 a partition of every parameter. These are the trained float32 weights. Frozen
weights and buffers are in the files of the model states in their own dtype; tied weights are listed there by name only.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ft_ckpt.errors import CorruptError, LoadError, damaged_input, listing
from ft_ckpt.formats.layout import ITEM_BYTES, Spec, checked_sizes
from ft_ckpt.formats.pickles import Passive
from ft_ckpt.formats.tensor_file import RawFile, Span, SpanFile, ZipRecords
from ft_ckpt.formats.torch_file import TensorPlace, load_torch_zip, split_tensors
from ft_ckpt.storage.place import Place
from ft_ckpt.storage.scratch import check_files_inside
from ft_ckpt.storage.store import Store, is_inside, read_text

_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_OPTIMIZER, _MODEL = "_optim_states.pt", "_model_states.pt"
_LATEST, _LATEST_BYTES = "latest", 4096
Shapes = Mapping[str, tuple[int, ...]]


@dataclass
class _FoundTensors:
    """The tensors found so far, each with its spans, and their aliases."""

    specs: dict[str, Spec] = field(default_factory=dict)
    spans: dict[str, list[Span]] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)

    def add_tensor(self, name: str, shape: tuple[int, ...], dtype: str, spans: Sequence[Span]) -> None:
        self.specs[name], self.spans[name] = Spec(name, shape, dtype), list(spans)

    def add_whole(self, name: str, stored: TensorPlace) -> None:
        if not stored.is_row_major:
            raise LoadError(f"{name}: stored with the strides {stored.stride}; save the checkpoint from plain tensors")
        self.add_tensor(name, stored.shape, stored.dtype, [stored.span])


def deepspeed_folder(place: Place) -> Place | None:
    """The folder with the ranks' files: `place`, or the one named by the file `latest` in it; None if there is none."""
    store, choices = place.folder, [place]
    if store.stat(_LATEST) is not None:
        check_files_inside(store, [_LATEST])
        named = read_text(store, _LATEST, _LATEST_BYTES, errors="replace").strip()
        choices += [Place(store, named)] if is_inside(named) else []
    return next((one for one in choices if any(name.endswith((_MODEL, _OPTIMIZER)) for name in _file_names(one))), None)


def _file_names(place: Place) -> list[str]:
    def natural_order(name: str) -> list[tuple[int, str]]:  # numbers by value
        return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]

    return sorted((each.name for each in place.folder.list_folder().objects), key=natural_order)


def open_deepspeed(place: Place) -> SpanFile:
    """The weights of the DeepSpeed checkpoint `place` (its folder, or the one that holds `latest`).

    Trained weights are float32, others have their saved dtype; names that shared a parameter are ties. Raises LoadError
    for model parallelism and experts, and for anything but tensors and plain data; CorruptError when files are missing
    or inconsistent.
    """
    found = deepspeed_folder(place)
    if found is None:
        raise LoadError(f"{place}: no *{_MODEL} in it; expected a folder that DeepSpeed's save_checkpoint wrote")
    names = _file_names(found)
    check_files_inside(found.folder, [name for name in names if name.endswith((_MODEL, _OPTIMIZER))])
    with damaged_input(f"{found.basename}: a checkpoint of DeepSpeed"):
        return _open_rank_files(found.folder, found.basename, names)


def _open_rank_files(store: Store, source: str, names: Sequence[str]) -> SpanFile:
    if experts := sorted(name for name in names if "expert" in name):
        raise LoadError(f"{source}: {experts[0]}: experts over ranks; expected data parallelism alone")
    optimizer_names = _optimizer_files(names, source)
    models = [_load_states(store, name) for name in names if name.endswith(_MODEL)]
    if not models or "module" not in models[0]:
        raise CorruptError(f"{source}: no model states in it; every rank must have saved to this folder")
    optimizers = [_load_states(store, name).get("optimizer_state_dict", {}) for name in optimizer_names]
    found = _FoundTensors()
    module, skipped = split_tensors(models[0]["module"] or {}, source)
    if optimizers and models[0].get("param_shapes"):
        _add_weights(found, models, optimizers, source)
    _add_rest(found, models[0], module, source)
    order = {name: place for place, name in enumerate(module)}
    names = sorted(found.specs, key=lambda name: order.get(name, len(order)))
    specs = {name: found.specs[name] for name in names}
    return SpanFile(specs, {name: found.spans[name] for name in names}, ties=found.ties, skipped=skipped)


def _load_states(store: Store, name: str) -> Any:
    file = RawFile(store.open(name))
    (written_as,) = {record.partition("/")[0] for record in ZipRecords(file).records}
    if written_as.endswith((_MODEL[:-3], _OPTIMIZER[:-3])) and f"{written_as}.pt" != name:  # torch stores the name
        raise CorruptError(f"{name}: was written as {written_as}.pt; use the files of each rank under their names")
    found = load_torch_zip(file)
    if not isinstance(found, dict):
        raise CorruptError(f"{name}: holds a {type(found).__name__}, expected a dict of states; use another copy")
    return found


def _optimizer_files(names: Sequence[str], source: str) -> list[str]:
    files = [name for name in names if name.endswith(_OPTIMIZER)]
    ranks = [match for match in map(_RANK.search, files) if match]
    if any(int(match[2]) for match in ranks) or any(name.startswith("mp_rank_01_") for name in names):
        raise LoadError(f"{source}: of a model in parallel parts (mp_rank_01); expected data parallelism alone")
    if [int(match[1]) for match in ranks] != list(range(len(files))):
        raise CorruptError(f"{source}: files of ranks {[m[1] for m in ranks]}; some rank's is missing or left over")
    return files


def _add_weights(found: _FoundTensors, models: Sequence[Any], optimizers: Sequence[Any], source: str) -> None:
    """Add trained and frozen parameters."""
    stage, count = optimizers[0]["zero_stage"], optimizers[0]["partition_count"]
    stage = int(stage.args[0] if isinstance(stage, Passive) else stage)
    count = max(count) if isinstance(count, list) else count
    if count != len(optimizers):
        raise CorruptError(f"{source}: {len(optimizers)} optimizer files, written by {count} ranks; some are missing")
    shapes = [{name: checked_sizes(shape) for name, shape in group.items()} for group in models[0]["param_shapes"]]
    frozen = {name: checked_sizes(shape) for name, shape in (models[0].get("frozen_param_shapes") or {}).items()}
    if stage <= 2:
        paddings = optimizers[0].get("param_alignment_paddings")
        groups = [one["single_partition_of_fp32_groups"] for one in optimizers]
        for index, group in enumerate(shapes):
            parts = [rank[index] for rank in groups]
            _add_from_vector(found, group, parts, paddings[index] if paddings else [0] * len(group), source)
        for name in frozen:
            found.add_whole(name, models[0]["frozen_param_fragments"][name])
        return
    merged = {name: shape for group in shapes for name, shape in group.items()}
    _add_from_pieces(found, merged, [one["fp32_flat_groups"] for one in optimizers], source)
    if frozen and len(models) != count:
        raise CorruptError(f"{source}: {len(models)} model files, written by {count} ranks; some are missing")
    for name, shape in frozen.items():
        parts = [model["frozen_param_fragments"][name] for model in models]
        found.add_tensor(name, tuple(shape), parts[0].dtype, _span_range(parts, 0, math.prod(shape), name))


def _add_from_vector(
    found: _FoundTensors, group: Shapes, parts: Sequence[TensorPlace], paddings: Sequence[int], source: str
) -> None:
    at = 0
    for (name, shape), padding in zip(group.items(), paddings, strict=True):
        size = math.prod(shape)
        found.add_tensor(name, tuple(shape), parts[0].dtype, _span_range(parts, at, size, name))
        at += size + padding
    _check_all_read(at, sum(math.prod(part.shape) for part in parts), 2 * len(parts), source)


def _add_from_pieces(found: _FoundTensors, shapes: Shapes, ranks: Sequence[Sequence[TensorPlace]], source: str) -> None:
    at = 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        piece = -(-size // len(ranks))  # the same on every rank; the last ones are padded
        spans = []
        for rank, parts in enumerate(ranks):
            spans += _span_range(parts, at, max(0, min(piece, size - rank * piece)), name)
        found.add_tensor(name, tuple(shape), ranks[0][0].dtype, spans)
        at += piece
    _check_all_read(at, sum(math.prod(part.shape) for part in ranks[0]), 1, source)


def _check_all_read(used: int, there: int, step: int, source: str) -> None:
    """Raise CorruptError unless all elements were used, except for padding that makes the ranks' pieces equal."""
    if -(-used // step) != -(-there // step):
        raise CorruptError(
            f"{source}: {there:,} elements in the files, {used:,} expected; the files do not fit together"
        )


def _span_range(parts: Sequence[TensorPlace], start: int, size: int, name: str) -> list[Span]:
    """The spans of elements [start, start + size) of the consecutive `parts`."""
    spans, begin = list(_cut_spans(parts, start, start + size)), sum(math.prod(part.shape) for part in parts)
    if sum(span.numel for span in spans) != size:
        raise CorruptError(
            f"{name}: elements {start:,} to {start + size:,}, the files have {begin:,}; one is cut short"
        )
    return spans


def _cut_spans(parts: Sequence[TensorPlace], start: int, stop: int) -> Iterator[Span]:
    begin = 0
    for part in parts:
        low, high = max(start, begin), min(stop, begin + math.prod(part.shape))
        if low < high:
            yield Span(part.file, part.start + (low - begin) * ITEM_BYTES[part.dtype], high - low, part.record)
        begin += math.prod(part.shape)


def _add_rest(found: _FoundTensors, model: Mapping[str, Any], module: Mapping[str, TensorPlace], source: str) -> None:
    """Add the tensors that are not in the optimizers' files: buffers, tied names, and untrained parameters."""
    for name, kept in (model.get("shared_params") or {}).items():
        one, other = (name, kept) if kept in found.specs else (kept, name)
        if other in found.specs and one not in found.specs:
            found.ties[one] = other
    places = {module[name]: name for name in module if name in found.specs}
    lost = []
    for name, stored in module.items():
        if name in found.specs or name in found.ties:
            continue
        if stored in places and 0 not in stored.shape:
            found.ties[name] = places[stored]
        elif 0 in stored.shape and name not in (model.get("buffer_names") or ()):
            lost.append(name)  # under ZeRO-3 the parameters in the model's state are empty
        else:
            found.add_whole(name, stored)
            places[stored] = name
    if lost:
        raise CorruptError(
            f"{source}: {listing(lost, ', ')}: in the model, but no file has them; use another checkpoint"
        )
