"""`ft-ckpt diff A B`. Torch is imported when the two are compared."""

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ft_ckpt.cli import views
from ft_ckpt.cli.arguments import given_paths
from ft_ckpt.cli.options import JsonOption
from ft_ckpt.cli.streams import print_lines

if TYPE_CHECKING:
    from ft_ckpt.files.diff import Difference

_Top = Annotated[int, typer.Option(help="Layers, and tensors, to list; 0 for all.")]
_HEADS = ("changed", "largest", "mean", "relative")


def diff_command(context: typer.Context, top: _Top = 20, as_json: JsonOption = False) -> None:
    """Compare the files, checkpoints or folders A and B: what changed, by how much, in which layers, and which settings
    that change the output differ.

    Exit code 1 if they differ.
    """
    one, other = given_paths(context, "A", "B")
    from ft_ckpt.checkpoint.open_checkpoint import hold_open
    from ft_ckpt.files.convert import open_source
    from ft_ckpt.files.diff import by_layer, compare_files, compare_settings

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
