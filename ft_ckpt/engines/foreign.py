"""Reads the chains of deltas that TRL's asynchronous GRPO writes: one safetensors file for each step.

    anchors/step_000010.safetensors   all weights by their names
    deltas/step_000011.safetensors    for each changed weight NAME.idx and NAME.val (or NAME.indices, NAME.values): flat
                                      positions and values; in the metadata the number of the step (model_version) and
                                      the encoding of positions: "raw", or "gap_delta", the gaps between them

They have no configs and no digests: configs come from a base, and only the number of a step can be checked.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ft_ckpt.checkpoint.open_checkpoint import hold_open
from ft_ckpt.errors import CorruptError, LoadError, MissingError, listing
from ft_ckpt.formats import detect
from ft_ckpt.formats.layout import Spec, TensorFile
from ft_ckpt.model.convert import ConvertReport, check_apart, convert_options, open_source, write_converted
from ft_ckpt.model.folder import WeightsFolder
from ft_ckpt.storage.place import Place, open_place, source_access

_STEP = re.compile(r"step_(\d+)\.safetensors")
_ENDINGS = ((".indices", ".values"), (".idx", ".val"))
_NOTHING = "__empty_delta__"  # the only tensor of a delta without changes in some versions


def rebuild_foreign(
    entry: str | Path | Place, out: str | Path | Place, base: str | Path | Place, *, overwrite: bool = False
) -> ConvertReport:
    """Write the weights at a step of a chain of TRL to the folder `out`, with the configs of `base`; all or nothing.

    `entry` is the path or URL of a file in its folder "anchors" or "deltas": the weights are those of the newest anchor
    up to this step, with all deltas after it. `base` is a Hugging Face folder or a checkpoint of the model, whose names
    and shapes are compared; the dtypes are the anchor's. Tensors are written in slices; memory holds the changes of one
    tensor. `overwrite` as in `convert`.

    Raises CorruptError if a step is missing, its number differs from its name, or its positions or values are invalid;
    LoadError if names or shapes differ from those of the base, or the encoding of positions is unknown.
    """
    step, origin = open_place(entry), open_place(base)
    options = convert_options(
        out, format="safetensors", dtype=None, max_shard_size=None, verify=False, progress=False,
        note=f"rebuilt from {step.basename}", to_folder=True, overwrite=overwrite,
    )  # fmt: skip
    check_apart([origin], options)
    places = _steps_to(step)
    with ExitStack() as stack:
        place = stack.enter_context(hold_open(origin))
        opened = stack.enter_context(closing(open_source(place, origin)))
        if not isinstance(opened, WeightsFolder) or len(opened.parts) != 1:
            raise LoadError(f"{origin}: expected the folder of one model, for its configs")
        files = [stack.enter_context(closing(detect.open_tensor_file(each.open()))) for each in places]
        part = replace(opened.parts[0], file=_RebuiltTensors(places, files, opened.parts[0].file))
        manifest = opened.manifest and replace(
            opened.manifest, made_from=(origin.basename,), run_id=None, rankings={}, metrics={}, export=True
        )
        access = source_access(place, origin, options.target)
        for each in places:
            access &= source_access(each, Place(each.beside), options.target)
        options = replace(options, access=access, made_from=(origin.basename,))
        return write_converted(WeightsFolder(opened.place, opened.origin, [part], manifest), place, options)


def _steps_to(entry: Place) -> list[Place]:
    """The newest anchor up to the step of `entry`, and all deltas after it. Raises CorruptError if one is missing."""
    chain = Place(entry.beside).beside
    anchors, deltas = (_files_by_number(Place(chain, kind)) for kind in ("anchors", "deltas"))
    named = _STEP.fullmatch(entry.basename)
    if named is None or not entry.is_object:
        raise MissingError(f"{entry}: expected a file such as deltas/step_000011.safetensors")
    number = int(named[1])
    first = max((each for each in anchors if each <= number), default=None)
    if first is None:
        raise CorruptError(f"{entry}: no anchor up to this step in {chain.where('anchors')}; use a later step")
    if missing := [f"step {each}" for each in range(first + 1, number + 1) if each not in deltas]:
        raise CorruptError(f"{entry}: {listing(missing, ', ')}: not in {chain.where('deltas')}; use a later anchor")
    return [anchors[first], *(deltas[each] for each in range(first + 1, number + 1))]


def _files_by_number(folder: Place) -> dict[int, Place]:
    names = (each.name for each in folder.folder.list())
    return {int(named[1]): Place(folder.folder, name) for name in names if (named := _STEP.fullmatch(name))}


class _RebuiltTensors:
    """The tensors of an anchor with the changes of the deltas applied, with the names and shapes of `base`."""

    def __init__(self, places: Sequence[Place], files: Sequence[TensorFile], base: TensorFile) -> None:
        self.places, self.files = places, files
        self.metadata: Mapping[str, str] = {"format": "pt"}
        self.ties: Mapping[str, str] = getattr(base, "ties", {})
        anchor, *deltas = files
        names = {name: spec for name, spec in anchor.specs.items() if name not in self.ties}
        wrong = [f"{name}: not in the base" for name in names.keys() - base.specs.keys()]
        wrong += [f"{name}: not in the anchor" for name in base.specs.keys() - names.keys()]
        wrong += [
            f"{name}: shape {list(names[name].shape)}, expected {list(spec.shape)}"
            for name, spec in base.specs.items()
            if name in names and names[name].shape != spec.shape
        ]
        if wrong:
            raise LoadError(f"{places[0]}: {listing(sorted(wrong))}; give the base that was trained")
        self.specs: Mapping[str, Spec] = {name: names[name] for name in base.specs}
        self.encodings = [_checked_step(place, file) for place, file in zip(places, files, strict=True)]
        self._loaded: tuple[str, list[tuple[Tensor, Tensor]]] = "", []
        for place, file in zip(places[1:], deltas, strict=True):
            known = {name + ending for name in anchor.specs for pair in _ENDINGS for ending in pair}
            if unknown := sorted(file.specs.keys() - known - {_NOTHING}):
                raise LoadError(f"{place}: {listing(unknown, ', ')}: changes of no tensor of the anchor")

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Flat elements [start, stop) of the tensor."""
        stop = self.specs[name].numel if stop is None else stop
        found = self.files[0].read(name, start, stop).clone()
        if self._loaded[0] != name:
            self._loaded = (
                name,
                [change for number in range(1, len(self.files)) for change in self._changes(number, name)],
            )
        for positions, values in self._loaded[1]:
            low, high = torch.searchsorted(positions, torch.tensor([start, stop], device="cpu")).tolist()
            found[positions[low:high] - start] = values[low:high]
        return found

    def close(self) -> None:
        """The files are closed by the caller."""

    def _changes(self, number: int, name: str) -> list[tuple[Tensor, Tensor]]:
        """The ascending positions and the values of one delta; empty if the tensor has not changed."""
        file, spec = self.files[number], self.specs[name]
        stored = [name + ending for pair in _ENDINGS for ending in pair if name + ending in file.specs]
        if not stored:
            return []
        if stored not in [[name + ending for ending in pair] for pair in _ENDINGS]:
            raise CorruptError(
                f"{self.places[number]}: {listing(stored, ', ')}: expected positions and values, each once"
            )
        positions, values = map(file.read, stored)
        if positions.is_floating_point():
            raise CorruptError(f"{self.places[number]}: {stored[0]}: positions in {positions.dtype}, expected integers")
        positions = positions.to(torch.int64)
        if self.encodings[number] == "gap_delta":
            positions = torch.cumsum(positions + 1, 0) - 1
        is_inside = not len(positions) or (positions[0] >= 0 and positions[-1] < spec.numel)
        if len(positions) != len(values) or not is_inside or bool((positions[1:] <= positions[:-1]).any()):
            raise CorruptError(f"{self.places[number]}: {name}: positions that are not ascending inside of the tensor")
        if values.dtype != getattr(torch, spec.dtype):
            raise CorruptError(f"{self.places[number]}: {name}: values in {values.dtype}, expected {spec.dtype}")
        return [(positions, values)]


def _checked_step(place: Place, file: TensorFile) -> str:
    """The encoding of positions. Raises CorruptError for a file of another step, LoadError for other encodings."""
    metadata: Mapping[str, str] = getattr(file, "metadata", {})
    named = _STEP.fullmatch(place.basename)
    number = metadata.get("model_version", "")
    if named is None or not number.isdecimal() or int(number) != int(named[1]):
        raise CorruptError(f"{place}: model_version {number or 'missing'}, expected that of its name; use another step")
    encoding = metadata.get("encoding", "raw")
    if encoding not in ("raw", "gap_delta"):
        raise LoadError(f"{place}: positions encoded as {encoding!r}, expected raw or gap_delta; write those")
    return encoding
