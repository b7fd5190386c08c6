"""The part of `show` that describes files of other programs."""

from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

from ft_ckpt.cli import output
from ft_ckpt.cli.describe import facts_of_folder
from ft_ckpt.cli.options import print_lines
from ft_ckpt.storage.places import Place
from ft_ckpt.values import human_size

if TYPE_CHECKING:
    from ft_ckpt.formats import Spec


_TENSOR = "\0"  # key in a node of the tree: full name of the tensor at this node


def show_file(source: Place, *, as_json: bool) -> None:
    """Print the tensors of a foreign file or folder as a tree; no tensor is read."""
    from ft_ckpt.checkpoint import hold_open
    from ft_ckpt.extensions.tools.converting import open_source

    with hold_open(source, compares=False) as place, closing(open_source(place)) as file:
        specs, ties = dict(file.specs), dict(file.ties)
        skipped = list(file.skipped)

    size = sum(spec.size_bytes for spec in specs.values())
    model = facts_of_folder(source.folder, ((spec.dtype, spec.shape) for spec in specs.values()))
    if as_json:
        tensors = [{**spec._asdict(), "bytes": spec.size_bytes} for spec in specs.values()]
        document = {
            "path": str(source),
            "bytes": size,
            "tensors": tensors,
            "ties": ties,
            "others": skipped,
            "model": model,
        }
        output.print_json(document)
        return

    print_lines(f"{source}: {model.headline()}", *(f"  {line}" for line in model.details()))
    print_lines(f"  {output.count_of(len(specs), 'tensor')}, {human_size(size)}", "")
    output.print_table(("tensor", "shape", "dtype", "size"), _tensor_rows(specs, ties))
    for line in skipped:
        print_lines(f"  {line}")


def _tensor_rows(
    specs: dict[str, "Spec"], ties: dict[str, str]
) -> Iterator[tuple[str, str, str, str]]:
    """Yield a row for each tensor, indented below the prefix that it shares with others."""
    root: dict[str, Any] = {}
    for name in (*specs, *ties):
        node = root
        for step in name.split("."):
            node = node.setdefault(step, {})
        node[_TENSOR] = name
    for step, node in root.items():
        yield from _node_rows(node, step, 0, specs, ties)


def _node_rows(
    node: dict[str, Any], label: str, depth: int, specs: dict[str, "Spec"], ties: dict[str, str]
) -> Iterator[tuple[str, str, str, str]]:
    name = node.get(_TENSOR)
    below = [(step, inner) for step, inner in node.items() if step != _TENSOR]
    if name is None and len(below) == 1:
        step, inner = below[0]
        yield from _node_rows(inner, f"{label}.{step}", depth, specs, ties)
        return

    label = "  " * depth + label
    if name in specs:
        spec = specs[name]
        yield label, output.human_shape(spec.shape), spec.dtype, human_size(spec.size_bytes)
    elif name is None:
        yield label, "", "", ""
    else:
        yield label, f"= {ties[name]}", "", ""

    for step, inner in below:
        yield from _node_rows(inner, step, depth + 1, specs, ties)
