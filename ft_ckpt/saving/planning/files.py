"""Decides which tensor goes into which file of a part.

A part is one saved model of a checkpoint, such as the policy, its value head or an adapter. Every
rank makes the same plan without exchanging anything.
"""

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

# With reuse_frozen="auto", the frozen tensors of a part have separate files if they have this many
# bytes, and this share of the bytes of the part.
MIN_FROZEN_BYTES = 64 << 20
MIN_FROZEN_SHARE = 0.25
# transformers refuses files without this entry.
_METADATA = {"format": "pt"}


@dataclass(frozen=True, eq=False)
class PartPlan:
    """One part and its files.

    Attributes:
        part: The part with its tensors.
        format: The name of the tensor format.
        files: The weight files with their layouts.
        index_path: The path of the shard index, even if there is none.
        index: The text of the shard index, which tells the file of each tensor; None for a single
            file.
        separate: Stored names of the frozen tensors that share no file with other tensors.
    """

    part: Part
    format: str
    files: tuple[FilePlan, ...]
    index_path: str
    index: str | None
    separate: frozenset[str] = frozenset()

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

    Tensors keep the order of the model. A file has at most `max_shard_bytes`, or a single tensor
    that is larger. The tensors named in `separate` come first and share no file with other tensors.
    An adapter has one file. Raises SelectionError naming tensors whose dtype or name the format
    cannot store, and IncompleteError naming tensors that would share a name in the files.
    """
    tensor_format = format_named(format_name)
    suffix = tensor_format.suffixes[0]
    _check_names(part)
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
        # The error of a file names only tensors of this file. So all tensors are laid out as one
        # file, whose error names all tensors that cannot be stored.
        _lay_out_file(list(specs.values()), tensor_format, part)
        raise

    if len(files) == 1:
        return PartPlan(part, format_name, tuple(files), index_path, None, separate)
    totals = {
        "total_parameters": sum(torch.Size(entry.shape).numel() for entry in part.entries),
        "total_size": sum(spec.size_bytes for spec in specs.values()),
    }
    index = shard_index(shards, totals)
    return PartPlan(part, format_name, tuple(files), index_path, index, separate)


def frozen_names(part: Part, frozen_keys: frozenset[int], mode: str) -> frozenset[str]:
    """Return the stored names of the frozen tensors of `part`.

    These tensors go into separate files, which later checkpoints can link. `frozen_keys` are the
    keys of frozen model tensors. A stored tensor that is converted from several model tensors is
    frozen if all of them are. `mode` is the setting `reuse_frozen`. Return no names if it is "off",
    or if it is "auto" and the frozen tensors are too small to be worth separate files.
    """
    if mode == "off" or not frozen_keys or part.kind not in ("model", "module"):
        return frozenset()
    names = []
    total_bytes = frozen_bytes = 0
    for entry in part.entries:
        size_bytes = torch.Size(entry.shape).numel() * entry.dtype.itemsize
        total_bytes += size_bytes
        if all(source.key in frozen_keys for source in entry.sources):
            names.append(entry.name)
            frozen_bytes += size_bytes
    min_bytes = max(MIN_FROZEN_BYTES, MIN_FROZEN_SHARE * total_bytes)
    is_worthwhile = mode == "on" or frozen_bytes >= min_bytes
    return frozenset(names) if is_worthwhile else frozenset()


def _check_names(part: Part) -> None:
    """Check that a file can have the names of all tensors.

    Raises IncompleteError naming duplicates, SelectionError naming names that no file can have.
    """
    names = [entry.name for entry in part.entries]
    if len(set(names)) < len(names):
        duplicates = [name for name, count in Counter(names).items() if count > 1]
        raise IncompleteError(
            f"{listing(duplicates, ', ')}: the name of more than one tensor; rename or re-register "
            "one"
        )
    # All names are checked as one text, because a model may have very many.
    if "__metadata__" in names or not is_utf8("".join(names)):
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
        with closing(tensor_format.open_file(store.open(file.path))) as opened_file:
            written.update(opened_file.specs)

    if written == expected:
        return
    problems: list[str] = []
    for name in expected:
        if name not in written:
            problems.append(f"{name}: in the model, not in the file")

    for name in written:
        if name not in expected:
            problems.append(f"{name}: in the file, not in the model")

    for name, spec in expected.items():
        in_file = written.get(name, spec)
        if in_file != spec:
            problems.append(
                f"{name}: {in_file.dtype} {in_file.shape} in the file, {spec.dtype} "
                f"{spec.shape} in the model"
            )

    if problems:
        raise IncompleteError(f"{listing(problems)}; nothing is committed")


def _stored_specs(part: Part) -> dict[str, Spec]:
    """Return the name, shape and dtype of each stored tensor, by name."""
    specs = {}
    for entry in part.entries:
        specs[entry.name] = Spec(entry.name, entry.shape, dtype_name(entry.dtype))
    return specs


def _lay_out_file(specs: list[Spec], tensor_format: TensorFormat, part: Part) -> Layout:
    """Lay out one file with the tensors `specs`.

    If the format can store further names of a tensor, the file has the names of tied tensors too.
    """
    ties: dict[str, str] = {}  # further name -> stored name
    if tensor_format.holds_aliases:
        names_in_file = {spec.name for spec in specs}
        for name, *aliases in part.ties:
            if name not in names_in_file:
                continue
            for alias in aliases:
                if alias not in names_in_file:
                    ties[alias] = name
    return tensor_format.lay_out_file(specs, {**_METADATA, **part.metadata}, ties)
