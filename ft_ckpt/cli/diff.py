"""`ft-ckpt diff A B`: compares the tensors of two checkpoints, model folders or weight files.

Below, a pair is always A and B. A difference of the library calls their specs `before` and `after`.
"""

import math
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

from ft_ckpt.cli import output
from ft_ckpt.cli.options import add_json, bounded, print_lines
from ft_ckpt.storage.places import open_place

if TYPE_CHECKING:
    from ft_ckpt.extensions.tools import Difference


_NUMBER_HEADS = ("largest", "mean", "relative")


def add_diff(parser: ArgumentParser) -> None:
    parser.description = (
        "Compare the tensors of A and B: which changed, by how much, in which layers. Settings "
        "that affect the output are compared, too. The exit code is 1 if they differ."
    )
    parser.add_argument("path_a", metavar="A", help="Checkpoint, model folder or weight file.")
    parser.add_argument("path_b", metavar="B", help="The one to compare it with.")
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
        places = [open_place(path) for path in (options.path_a, options.path_b)]
        held_places = [stack.enter_context(hold_open(place)) for place in places]
        file_a, file_b = (stack.enter_context(closing(open_source(place))) for place in held_places)
        tensors = compare_files(file_a, file_b)
        settings = compare_settings(file_a, file_b)

    layers = by_layer(tensors)
    max_rows = options.top or None  # 0 lists all
    counts = Counter(tensor.status for tensor in tensors)
    if options.as_json:
        document = {
            "a": options.path_a,
            "b": options.path_b,
            "counts": counts,
            "tensors": [_difference_json(tensor) for tensor in tensors[:max_rows]],
            "layers": [_difference_json(layer) for layer in layers[:max_rows]],
            "settings": [
                {"name": name, "a": value_a, "b": value_b} for name, value_a, value_b in settings
            ],
        }
        output.print_json(document)
    else:
        totals = ", ".join(f"{count} {status}" for status, count in counts.items())
        print_lines(f"{options.path_a} -> {options.path_b}: {totals or 'no tensors'}")
        for name, value_a, value_b in settings:
            print_lines(f"{name}: {value_a} -> {value_b}")
        layer_rows = [_layer_row(layer) for layer in layers if layer.changed]
        _print_first_rows(("layer", "tensors", *_NUMBER_HEADS), layer_rows, max_rows)
        tensor_rows = [_tensor_row(tensor) for tensor in tensors if tensor.changed]
        _print_first_rows(("tensor", "changed", *_NUMBER_HEADS), tensor_rows, max_rows)

    are_different = bool(settings) or any(tensor.changed for tensor in tensors)
    return 1 if are_different else 0


def _print_first_rows(
    heads: tuple[str, ...], rows: Sequence[tuple[str, ...]], max_rows: int | None
) -> None:
    """Print a table of the first `max_rows` rows, and how many more there are."""
    if not rows:
        return
    shown_rows = rows[:max_rows]
    print_lines()
    output.print_table(heads, shown_rows)
    if len(rows) > len(shown_rows):
        print_lines(f"and {len(rows) - len(shown_rows)} more; see --top")


def _layer_row(layer: "Difference") -> tuple[str, ...]:
    return layer.name, f"{layer.changed} of {layer.tensors}", *_number_cells(layer)


def _tensor_row(tensor: "Difference") -> tuple[str, ...]:
    """Return a tensor's cells; the second one is such as "shape 2x3 -> 2x4 float32"."""
    specs = [spec for spec in (tensor.before, tensor.after) if spec is not None]
    shapes = dict.fromkeys(output.human_shape(spec.shape) for spec in specs)
    dtypes = dict.fromkeys(spec.dtype for spec in specs)
    words = [" -> ".join(shapes), " -> ".join(dtypes)]
    if tensor.status != "changed":
        words.insert(0, tensor.status)
    return tensor.name, " ".join(words), *_number_cells(tensor)


def _number_cells(difference: "Difference") -> tuple[str, str, str]:
    """Return the cells below `_NUMBER_HEADS`; they are empty if no elements could be compared."""
    sums = difference.sums
    if not sums.elements:
        return "", "", ""
    largest = f"{sums.largest:.3g}"
    if sums.unbounded:
        largest += f" ({sums.unbounded} not finite)"
    relative = "-"
    if math.isfinite(difference.relative):
        relative = f"{difference.relative:.3g}"
    return largest, f"{difference.mean:.3g}", relative


def _difference_json(difference: "Difference") -> dict[str, Any]:
    """Return a tensor's or a layer's difference for the JSON output; unknown numbers are None."""
    specs: dict[str, Any] = {}
    for side, spec in (("a", difference.before), ("b", difference.after)):
        if spec is not None:
            specs[side] = {"shape": list(spec.shape), "dtype": spec.dtype}

    if not specs:  # a layer has no spec
        specs = {"tensors": difference.tensors, "changed": difference.changed}
    numbers: dict[str, float | None] = {"largest": None, "mean": None, "relative": None}
    if difference.sums.elements:
        numbers["largest"] = difference.sums.largest
        numbers["mean"] = difference.mean
        if math.isfinite(difference.relative):
            numbers["relative"] = difference.relative

    return {
        "name": difference.name,
        "status": difference.status,
        **specs,
        **numbers,
        "not_finite": difference.sums.unbounded,
    }
