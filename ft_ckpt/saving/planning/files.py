"""Decides which tensor goes into which file of a part; the plan is the same on every rank."""

from collections import Counter
from contextlib import closing
from dataclasses import dataclass

import torch

from ft_ckpt.errors import IncompleteError, SelectionError, listing
from ft_ckpt.formats import (
    DEFAULT_FORMAT,
    FilePlan,
    Layout,
    Spec,
    TensorFormat,
    dtype_name,
    format_named,
    shard_index,
    split_into_files,
)
from ft_ckpt.model.tensors import Part
from ft_ckpt.storage import Store, is_utf8

MIN_FROZEN_BYTES = 64 << 20  # frozen bytes of a part that justify a separate file
MIN_FROZEN_SHARE = 0.25  # share of frozen bytes in a part that justifies a separate file
_METADATA = {"format": "pt"}  # transformers refuses files without it


@dataclass(frozen=True, eq=False)
class PartPlan:
    """One part and its files; `index` is the text of its shard index, None for a single file."""

    part: Part
    format: str
    files: tuple[FilePlan, ...]
    index_path: str
    index: str | None
    separate: frozenset[str] = frozenset()  # stored names of frozen tensors, in files of their own

    @property
    def size_bytes(self) -> int:
        return sum(file.layout.size_bytes for file in self.files)


def plan_part(
    part: Part,
    max_shard_bytes: int,
    format_name: str = DEFAULT_FORMAT,
    separate: frozenset[str] = frozenset(),
) -> PartPlan:
    """Divide the tensors of `part` into files, as transformers does.

    Tensors keep the order of the model. A file has at most `max_shard_bytes`, or one tensor. The
    tensors named in `separate` come first and share no file with other tensors. An adapter has one
    file. Raises SelectionError naming tensors whose dtype or name the format cannot store, and
    IncompleteError naming tensors that would share a name in the files.
    """
    tensor_format = format_named(format_name)
    suffix = tensor_format.suffixes[0]
    _refuse_stored_names(part)
    specs = _stored_specs(part)
    folder = f"{part.path}/" if part.path else ""
    index_path = f"{folder}{part.file}{suffix}.index.json"
    shards = {f"{part.file}{suffix}": list(specs)}
    files = []
    try:
        if part.kind != "adapter":  # PEFT reads one file only
            shards = split_into_files(specs, part.file, suffix, max_shard_bytes, separate)
        for file_name, names in shards.items():
            layout = _lay_out_file([specs[name] for name in names], tensor_format, part)
            files.append(FilePlan(folder + file_name, layout))
    except (SelectionError, KeyError):
        # laid out as one file, for an error that names all tensors that cannot be stored
        _lay_out_file(list(specs.values()), tensor_format, part)
        raise
    if len(files) == 1:
        return PartPlan(part, format_name, tuple(files), index_path, None, separate)
    total = {
        "total_parameters": sum(torch.Size(entry.shape).numel() for entry in part.entries),
        "total_size": sum(spec.size_bytes for spec in specs.values()),
    }
    index = shard_index(shards, total)
    return PartPlan(part, format_name, tuple(files), index_path, index, separate)


def frozen_names(part: Part, frozen: frozenset[int], mode: str) -> frozenset[str]:
    """Return the stored names of `part` that consist of `frozen` tensors only.

    These go into separate files, which later checkpoints can link. Return no names if `mode` is
    "off", or if it is "auto" and the frozen tensors are too small for separate files to pay.
    """
    if mode == "off" or not frozen or part.kind not in ("model", "module"):
        return frozenset()
    names = []
    total_bytes = frozen_bytes = 0
    for entry in part.entries:
        size_bytes = torch.Size(entry.shape).numel() * entry.dtype.itemsize
        total_bytes += size_bytes
        if all(source.key in frozen for source in entry.sources):
            names.append(entry.name)
            frozen_bytes += size_bytes
    pays = mode == "on" or frozen_bytes >= max(MIN_FROZEN_BYTES, MIN_FROZEN_SHARE * total_bytes)
    return frozenset(names) if pays else frozenset()


def _refuse_stored_names(part: Part) -> None:
    """Refuse names that a file cannot have.

    Raises IncompleteError for duplicates, SelectionError for all other names.
    """
    names = [entry.name for entry in part.entries]
    if len(set(names)) < len(names):
        twice = [name for name, count in Counter(names).items() if count > 1]
        raise IncompleteError(
            f"{listing(twice, ', ')}: the name of more than one tensor; rename or re-register one"
        )
    if "__metadata__" in names or not is_utf8("".join(names)):  # one check for all names
        bad = [repr(name) for name in names if name == "__metadata__" or not is_utf8(name)]
        raise SelectionError(
            f"{listing(bad, ', ')}: files cannot have a tensor of this name; rename the parameter"
        )


def check_written_files(part_plan: PartPlan, store: Store) -> None:
    """Compare the headers of the written files with the planned names, shapes and dtypes.

    Raises IncompleteError naming every difference.
    """
    tensor_format = format_named(part_plan.format)
    expected = _stored_specs(part_plan.part)
    written: dict[str, Spec] = {}
    for file in part_plan.files:
        with closing(tensor_format.open_file(store.open(file.path))) as opened:
            written.update(opened.specs)
    if written == expected:
        return
    missing: list[str] = []
    differing: list[str] = []
    for name, spec in expected.items():
        in_file = written.get(name)
        if in_file is None:
            missing.append(f"{name}: in the model, not in the file")
        elif in_file != spec:
            differing.append(
                f"{name}: {in_file.dtype} {in_file.shape} in the file, {spec.dtype} "
                f"{spec.shape} in the model"
            )
    unknown = [name for name in written if name not in expected]
    problems = [
        *missing,
        *(f"{name}: in the file, not in the model" for name in unknown),
        *differing,
    ]
    if problems:
        raise IncompleteError(f"{listing(problems)}; nothing is committed")


def _stored_specs(part: Part) -> dict[str, Spec]:
    specs = {}
    for entry in part.entries:
        specs[entry.name] = Spec(entry.name, entry.shape, dtype_name(entry.dtype))
    return specs


def _lay_out_file(specs: list[Spec], tensor_format: TensorFormat, part: Part) -> Layout:
    ties: dict[str, str] = {}  # alias -> stored name
    if tensor_format.holds_aliases:
        stored = {spec.name for spec in specs}
        for name, *aliases in part.ties:
            if name not in stored:
                continue
            for alias in aliases:
                if alias not in stored:
                    ties[alias] = name
    return tensor_format.lay_out_file(specs, {**_METADATA, **part.metadata}, ties)
