"""The command `diff`."""

import math
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

from ft_ckpt.cli import output
from ft_ckpt.cli.options import add_json, bounded, print_lines
from ft_ckpt.storage.places import open_place

if TYPE_CHECKING:
    from ft_ckpt.extensions.tools import Difference


_HEADS = ("changed", "largest", "mean", "relative")


def add_diff(parser: ArgumentParser) -> None:
    parser.description = (
        "Compare the tensors of A and B: which changed, by how much, in which layers. Settings "
        "that affect the output are compared, too. The exit code is 1 if they differ."
    )
    parser.add_argument("one", metavar="A", help="Checkpoint, model folder or weight file.")
    parser.add_argument("other", metavar="B", help="The one to compare it with.")
    parser.add_argument(
        "--top",
        type=bounded(int, 0),
        default=20,
        metavar="N",
        help="Number of layers and of tensors to list; 0 lists all (default: 20).",
    )
    add_json(parser)
    parser.set_defaults(run=_diff)


def _diff(options: Namespace) -> int:
    from ft_ckpt.checkpoint import hold_open
    from ft_ckpt.extensions.tools import by_layer, compare_files, compare_settings
    from ft_ckpt.extensions.tools.converting import open_source

    with ExitStack() as stack:
        sources = [open_place(path) for path in (options.one, options.other)]
        places = [stack.enter_context(hold_open(source)) for source in sources]
        opened = [stack.enter_context(closing(open_source(place))) for place in places]
        tensors, settings = compare_files(*opened), compare_settings(*opened)
    layers = by_layer(tensors)
    max_rows = options.top or None
    counts = Counter(tensor.status for tensor in tensors)
    if options.as_json:
        document = {
            "a": options.one,
            "b": options.other,
            "counts": counts,
            "tensors": [_difference_json(tensor) for tensor in tensors[:max_rows]],
            "layers": [_difference_json(layer) for layer in layers[:max_rows]],
            "settings": [{"name": name, "a": old, "b": new} for name, old, new in settings],
        }
        output.print_json(document)
    else:
        totals = ", ".join(f"{count} {status}" for status, count in counts.items())
        print_lines(f"{options.one} -> {options.other}: {totals or 'no tensors'}")
        for name, old, new in settings:
            print_lines(f"{name}: {old} -> {new}")
        _print_differences(("layer", "tensors", *_HEADS[1:]), layers, max_rows)
        _print_differences(("tensor", *_HEADS), tensors, max_rows)
    differ = bool(settings) or any(tensor.changed for tensor in tensors)
    return 1 if differ else 0


def _print_differences(
    heads: tuple[str, ...], differences: Sequence["Difference"], max_rows: int | None
) -> None:
    unequal = [difference for difference in differences if difference.changed]
    if not unequal:
        return
    print_lines()
    shown = unequal[:max_rows]
    rows = []
    for difference in shown:
        words = " ".join(_change_words(difference))
        rows.append((difference.name, words, *_change_figures(difference)))
    output.print_table(heads, rows)
    if len(unequal) > len(shown):
        print_lines(f"and {len(unequal) - len(shown)} more; see --top")


def _change_words(difference: "Difference") -> Iterator[str]:
    """Yield a layer's number of changed tensors, or a tensor's status, shapes and dtypes."""
    sides = [spec for spec in (difference.before, difference.after) if spec is not None]
    if not sides:
        yield f"{difference.changed} of {difference.tensors}"
        return
    if difference.status != "changed":
        yield difference.status
    yield " -> ".join(dict.fromkeys(output.human_shape(spec.shape) for spec in sides))
    yield " -> ".join(dict.fromkeys(spec.dtype for spec in sides))


def _change_figures(difference: "Difference") -> tuple[str, str, str]:
    sums = difference.sums
    if not sums.elements:  # none were comparable
        return "", "", ""
    largest = f"{sums.largest:.3g}"
    if sums.unbounded:
        largest += f" ({sums.unbounded} not finite)"
    relative = "-"
    if math.isfinite(difference.relative):
        relative = f"{difference.relative:.3g}"
    return largest, f"{difference.mean:.3g}", relative


def _difference_json(difference: "Difference") -> dict[str, Any]:
    sides: dict[str, Any] = {}
    for side, spec in (("a", difference.before), ("b", difference.after)):
        if spec is not None:
            sides[side] = {"shape": list(spec.shape), "dtype": spec.dtype}
    if not sides:
        sides = {"tensors": difference.tensors, "changed": difference.changed}
    figures: dict[str, float | None] = {"largest": None, "mean": None, "relative": None}
    if difference.sums.elements:
        figures["largest"] = difference.sums.largest
        figures["mean"] = difference.mean
        if math.isfinite(difference.relative):
            figures["relative"] = difference.relative
    return {
        "name": difference.name,
        "status": difference.status,
        **sides,
        **figures,
        "not_finite": difference.sums.unbounded,
    }
