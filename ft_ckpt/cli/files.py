"""The commands `convert`, `average`, `merge` and `diff`, and the part of `show` that describes files."""

import dataclasses
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ft_ckpt.cli import views
from ft_ckpt.cli.options import (
    DtypeOption,
    ForceOption,
    FormatOption,
    JsonOption,
    ShardOption,
    VerifyOption,
    given_paths,
    print_lines,
)
from ft_ckpt.config import human_size
from ft_ckpt.errors import TargetError
from ft_ckpt.storage.place import Place, open_place

if TYPE_CHECKING:
    from ft_ckpt.formats.layout import Spec
    from ft_ckpt.model.convert import ConvertReport

import math
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ft_ckpt.model.diff import Difference

import ctypes
from contextlib import suppress

from ft_ckpt.cli.options import several_paths

_Map = Annotated[str | None, typer.Option("--map", help='File of lines "old new", or JSON; * at the end of both.')]
_Shards = Annotated[str | None, typer.Option(help='File of lines "pattern shard": TensorFlow checkpoints.')]
_HERE = "\0"  # key of the tensor itself among what its name leads to


def convert_command(
    context: typer.Context,
    format: FormatOption = None,  # noqa: A002
    dtype: DtypeOption = None,
    names: _Map = None,
    max_shard_size: ShardOption = None,
    shards: _Shards = None,
    verify: VerifyOption = False,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write the weights of SRC to DST in another format; DST is a file with its format's suffix, or a folder."""
    source, target = given_paths(context, "SRC", "DST")
    refuse_existing(target, force)
    from ft_ckpt.model.convert import convert as run

    report = run(
        source, target, format=format, dtype=dtype, map=names, max_shard_size=max_shard_size, shards=shards,
        verify=verify, overwrite=force,
    )  # fmt: skip
    print_conversion(source, report, verify, as_json=as_json)


def refuse_existing(target: str, force: bool) -> None:
    """Raise TargetError if something would be replaced and that was not asked for."""
    if not force and _is_occupied(open_place(target)):
        raise TargetError(f"{target}: is there already; give --force to replace it, or choose another path")


def _is_occupied(target: Place) -> bool:
    """Whether something would be replaced; an empty folder is nothing."""
    found = target.folder.list_folder()
    return bool(found.folders or found.objects) if target.is_folder else found.exists


def show_file(source: Place, *, as_json: bool) -> None:
    """The tensors of a file or folder that is no checkpoint of ours, as a tree; none of them is read."""
    from ft_ckpt.checkpoint.open_checkpoint import hold_open
    from ft_ckpt.model.convert import open_source

    with hold_open(source, compares=False) as place, closing(open_source(place)) as file:
        specs, ties = dict(file.specs), dict(getattr(file, "ties", {}))
        skipped = list(getattr(file, "skipped", ()))
    size = sum(spec.size_bytes for spec in specs.values())
    if as_json:
        tensors = [{**spec._asdict(), "bytes": spec.size_bytes} for spec in specs.values()]
        views.print_json({"path": str(source), "bytes": size, "tensors": tensors, "ties": ties, "others": skipped})
        return
    print_lines(f"{source}: {len(specs)} tensors, {human_size(size)}")
    views.print_table(("tensor", "shape", "dtype", "size"), _tensor_rows(specs, ties))
    for other in skipped:
        print_lines(f"  {other}")


TensorRow = tuple[str, str, str, str]


def _tensor_rows(specs: dict[str, "Spec"], ties: dict[str, str]) -> Iterator[TensorRow]:
    """A row for each tensor, indented below what several names begin with."""
    root: dict[str, Any] = {}
    for name in (*specs, *ties):
        node = root
        for step in name.split("."):
            node = node.setdefault(step, {})
        node[_HERE] = name
    for step, node in root.items():
        yield from _node_rows(node, step, 0, specs, ties)


def _node_rows(
    node: dict[str, Any], label: str, depth: int, specs: dict[str, "Spec"], ties: dict[str, str]
) -> Iterator[TensorRow]:
    below = [(step, inner) for step, inner in node.items() if step != _HERE]
    if _HERE not in node and len(below) == 1:
        yield from _node_rows(below[0][1], f"{label}.{below[0][0]}", depth, specs, ties)
        return
    name, label = node.get(_HERE), "  " * depth + label
    if name in specs:
        yield label, views.human_shape(specs[name].shape), specs[name].dtype, human_size(specs[name].size_bytes)
    else:
        yield label, "" if name is None else f"= {ties[name]}", "", ""
    for step, inner in below:
        yield from _node_rows(inner, step, depth + 1, specs, ties)


def print_conversion(source: str, report: "ConvertReport", verified: bool, *, as_json: bool) -> None:
    """Say what was written from `source`, in a line or as JSON."""
    if as_json:
        found: dict[str, Any] = {**dataclasses.asdict(report), "path": str(report.path), "verified": verified}
        views.print_json(found)
        return
    casts = ", ".join(f"{count} x {cast}" for cast, count in report.casts.items())
    facts = [f"{report.tensors} tensors", human_size(report.bytes), f"{report.seconds:.1f} s"]
    facts += [f"cast {casts}"] if casts else []
    facts += ["verified"] if verified else []
    print_lines(f"{source} -> {report.path} ({report.format}): {', '.join(facts)}")
    for note in report.notes:
        print_lines(f"  {note}")
    if report.skipped:
        shown = ", ".join(report.skipped[:8]) + (", ..." if len(report.skipped) > 8 else "")
        print_lines(f"  {len(report.skipped)} left out: {shown}")


_Top = Annotated[int, typer.Option(help="Layers, and tensors, to list; 0 for all.")]
_HEADS = ("changed", "largest", "mean", "relative")


def diff_command(context: typer.Context, top: _Top = 20, as_json: JsonOption = False) -> None:
    """Compare the files, checkpoints or folders A and B: what changed, by how much, in which layers, and which settings
    that change the output differ.

    Exit code 1 if they differ.
    """
    one, other = given_paths(context, "A", "B")
    from ft_ckpt.checkpoint.open_checkpoint import hold_open
    from ft_ckpt.model.convert import open_source
    from ft_ckpt.model.diff import by_layer, compare_files, compare_settings

    with ExitStack() as stack:
        places = [stack.enter_context(hold_open(each)) for each in (one, other)]
        opened = [stack.enter_context(closing(open_source(place))) for place in places]
        tensors, settings = compare_files(*opened), compare_settings(*opened)
    layers, most = by_layer(tensors), top if top > 0 else None
    counts = {status: [each.status for each in tensors].count(status) for status in _found_statuses(tensors)}
    if as_json:
        found = {
            "tensors": list(map(_difference_json, tensors[:most])),
            "layers": list(map(_difference_json, layers[:most])),
        }
        found["settings"] = [{"name": name, "a": before, "b": after} for name, before, after in settings]
        views.print_json({"a": one, "b": other, "counts": counts, **found})
        sys.exit(1 if settings or any(each.changed for each in tensors) else 0)
    print_lines(
        f"{one} -> {other}: {', '.join(f'{count} {status}' for status, count in counts.items()) or 'no tensors'}"
    )
    for name, before, after in settings:
        print_lines(f"{name}: {before} -> {after}")
    _print_differences(("layer", "tensors", *_HEADS[1:]), layers, most)
    _print_differences(("tensor", *_HEADS), tensors, most)
    sys.exit(1 if settings or any(each.changed for each in tensors) else 0)


def _found_statuses(tensors: Sequence["Difference"]) -> list[str]:
    return list(dict.fromkeys(each.status for each in tensors))


def _print_differences(heads: tuple[str, ...], found: Sequence["Difference"], most: int | None) -> None:
    unequal = [each for each in found if each.changed]
    if not unequal:
        return
    print_lines()
    views.print_table(heads, map(_difference_cells, unequal[:most]))
    if len(unequal) > len(unequal[:most]):
        print_lines(f"and {len(unequal) - len(unequal[:most])} more; see --top")


def _difference_cells(each: "Difference") -> tuple[str, ...]:
    figures = (
        tuple(_change_figures(each)) if each.sums.elements else ("", "", "")
    )  # of what could not be compared there are none
    return each.name, " ".join(_change_words(each)), *figures


def _change_words(each: "Difference") -> Iterator[str]:
    """Of a layer how many of its tensors changed; of a tensor what did, besides values."""
    if each.before is None and each.after is None:
        yield f"{each.changed} of {each.tensors}"
        return
    sides = [spec for spec in (each.before, each.after) if spec is not None]
    yield from [each.status] if each.status != "changed" else []
    shapes = list(dict.fromkeys(views.human_shape(spec.shape) for spec in sides))
    yield " -> ".join(shapes)
    yield " -> ".join(dict.fromkeys(spec.dtype for spec in sides))


def _change_figures(each: "Difference") -> Iterator[str]:
    yield f"{each.sums.largest:.3g}" + (f" ({each.sums.unbounded} not finite)" if each.sums.unbounded else "")
    yield f"{each.mean:.3g}"
    yield f"{each.relative:.3g}" if math.isfinite(each.relative) else "-"


def _difference_json(each: "Difference") -> dict[str, Any]:
    sides = {
        side: {"shape": list(spec.shape), "dtype": spec.dtype}
        for side, spec in (("a", each.before), ("b", each.after))
        if spec is not None
    }
    return {
        "name": each.name,
        "status": each.status,
        **(sides or {"tensors": each.tensors, "changed": each.changed}),
        "largest": each.sums.largest if each.sums.elements else None,
        "mean": each.mean if each.sums.elements else None,
        "relative": each.relative if each.sums.elements and math.isfinite(each.relative) else None,
        "not_finite": each.sums.unbounded,
    }


_Base = Annotated[str | None, typer.Option(help="Folder of the base; else the one the adapter names, if it is here.")]
_Adapters = Annotated[list[str] | None, typer.Option("--adapter", help="One of several, by name; may be repeated.")]
_Weights = Annotated[str | None, typer.Option(help='A number for each adapter, as in "0.7,0.3".')]
_Check = Annotated[bool, typer.Option("--check", help="Compare the logits of both models before OUT is committed.")]
_AnyBase = Annotated[bool, typer.Option("--any-base", help="Do not compare the base with the one trained on.")]
_Dequantize = Annotated[bool, typer.Option("--dequantize", help="Merge into a quantised base as it is, dequantised.")]
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # settings of glibc's allocator
_KEPT_BYTES = 1 << 30


def merge_command(
    context: typer.Context,
    base: _Base = None,
    adapters: _Adapters = None,
    weights: _Weights = None,
    format: FormatOption = None,  # noqa: A002
    dtype: DtypeOption = None,
    max_shard_size: ShardOption = None,
    check: _Check = False,
    any_base: _AnyBase = False,
    dequantize: _Dequantize = False,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write the base with ADAPTER merged into it to the folder OUT, layer by layer: in float32, rounded once."""
    source, target = given_paths(context, "ADAPTER", "OUT")
    refuse_existing(target, force)
    _keep_freed_memory()
    from ft_ckpt.model.average import parse_weights
    from ft_ckpt.saving.merge_files import merge

    report = merge(
        source, target, base=base, adapters=adapters or None, weights=parse_weights(weights), format=format,
        dtype=dtype, max_shard_size=max_shard_size, check="logits" if check else None, check_base=not any_base,
        dequantize=dequantize, overwrite=force,
    )  # fmt: skip
    print_conversion(source, report, False, as_json=as_json)


def _keep_freed_memory() -> None:
    """Let the allocator keep what is freed: the next layer needs as much, and new pages cost as much as its sums.

    Of this process, which does nothing else.
    """
    with suppress(AttributeError, OSError):  # another allocator
        libc = ctypes.CDLL(None)
        for setting in (_MMAP_THRESHOLD, _TRIM_THRESHOLD):
            libc.mallopt(setting, _KEPT_BYTES)


_AverageWeights = Annotated[
    str | None, typer.Option(help='A number for each source, as in "1,2,1"; else all count alike.')
]
_Last = Annotated[int | None, typer.Option(help="Of one RUN, its so many newest valid checkpoints.")]


def average_command(
    context: typer.Context,
    weights: _AverageWeights = None,
    last: _Last = None,
    format: FormatOption = None,  # noqa: A002
    dtype: DtypeOption = None,
    max_shard_size: ShardOption = None,
    verify: VerifyOption = False,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write the average of the checkpoints A, B, ... to OUT: in float32, rounded once; of adapters factor by factor."""
    *sources, target = several_paths(context, "A B ... OUT" if last is None else "RUN OUT")
    refuse_existing(target, force)
    from ft_ckpt.model.average import average, parse_weights

    report = average(
        sources, target, weights=parse_weights(weights), last=last, format=format, dtype=dtype,
        max_shard_size=max_shard_size, verify=verify, overwrite=force,
    )  # fmt: skip
    print_conversion(", ".join(sources), report, verify, as_json=as_json)
