"""The commands `convert`, `average`, `merge` and `diff`, and the part of `show` that describes
files.
"""

import ctypes
import math
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from typing import TYPE_CHECKING, Any

from ft_ckpt.cli import views
from ft_ckpt.cli.describe import facts_of_folder
from ft_ckpt.cli.options import add_force, add_json, bounded, print_lines
from ft_ckpt.config import human_size
from ft_ckpt.errors import TargetError
from ft_ckpt.formats import written_formats
from ft_ckpt.storage import Place, open_place

if TYPE_CHECKING:
    from ft_ckpt.extensions.tools import ConvertReport, Difference
    from ft_ckpt.formats import Spec

_MAX_SKIPPED = 8  # tensors that are named
_TENSOR = "\0"  # key in a node of the tree: full name of the tensor at this node


def _add_output_options(parser: ArgumentParser) -> None:
    formats = ", ".join(tensor_format.name for tensor_format in written_formats())
    parser.add_argument("--format", help=f"Format: {formats} (default: by the suffix).")
    parser.add_argument("--dtype", help="Cast floats to float64, float32, bfloat16 or float16.")
    parser.add_argument(
        "--max-shard-size", metavar="SIZE", help='Maximum size of a weight file, as in "5GB".'
    )
    add_force(parser)
    add_json(parser)


def _add_verify(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--verify", action="store_true", help="Read the result back and compare it bit for bit."
    )


def add_convert(parser: ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="Checkpoint, model folder or weight file.")
    parser.add_argument(
        "target", metavar="DST", help="File to write, with the suffix of its format, or folder."
    )
    parser.add_argument(
        "--map",
        metavar="FILE",
        help='Rename tensors: a file of lines "old new", or JSON; both may end in *.',
    )
    parser.add_argument(
        "--shards", metavar="FILE", help='For TensorFlow: a file of lines "pattern shard".'
    )
    _add_verify(parser)
    _add_output_options(parser)
    parser.set_defaults(run=_convert)


def _convert(options: Namespace) -> None:
    """Write the weights of SRC to DST in another format or dtype.

    DST is a file with the suffix of its format, or a folder.
    """
    refuse_existing(options.target, options.force)
    from ft_ckpt.extensions.tools import convert

    report = convert(
        options.source,
        options.target,
        format=options.format,
        dtype=options.dtype,
        map=options.map,
        max_shard_size=options.max_shard_size,
        shards=options.shards,
        verify=options.verify,
        overwrite=options.force,
    )
    print_conversion(options.source, report, options.verify, as_json=options.as_json)


def refuse_existing(target: str, force: bool) -> None:
    """Raise TargetError if `target` exists, unless it is an empty folder or `force` is set."""
    place = open_place(target)
    listed = place.folder.list_folder()
    is_taken = listed.exists
    if place.is_folder:
        is_taken = bool(listed.folders or listed.objects)
    if is_taken and not force:
        raise TargetError(
            f"{target}: exists already; give --force to replace it, or choose another path"
        )


def show_file(source: Place, *, as_json: bool) -> None:
    """Print the tensors of a foreign file or folder as a tree; no tensor is read."""
    from ft_ckpt.checkpoint import hold_open
    from ft_ckpt.extensions.tools import open_source

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
        views.print_json(document)
        return
    print_lines(f"{source}: {model.headline()}", *(f"  {line}" for line in model.details()))
    print_lines(f"  {views.count_of(len(specs), 'tensor')}, {human_size(size)}", "")
    views.print_table(("tensor", "shape", "dtype", "size"), _tensor_rows(specs, ties))
    for line in skipped:
        print_lines(f"  {line}")


def _tensor_rows(
    specs: dict[str, "Spec"], ties: dict[str, str]
) -> Iterator[tuple[str, str, str, str]]:
    """A row for each tensor, indented below the prefix that it shares with others."""
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
        yield label, views.human_shape(spec.shape), spec.dtype, human_size(spec.size_bytes)
    elif name is None:
        yield label, "", "", ""
    else:
        yield label, f"= {ties[name]}", "", ""
    for step, inner in below:
        yield from _node_rows(inner, step, depth + 1, specs, ties)


def print_conversion(
    source: str, report: "ConvertReport", verified: bool, *, as_json: bool
) -> None:
    """Print what was written from `source`, in a line or as JSON."""
    if as_json:
        views.print_json({**vars(report), "verified": verified})
        return
    casts = ", ".join(f"{count} x {cast}" for cast, count in report.casts.items())
    facts = [f"{report.tensors} tensors", human_size(report.bytes), f"{report.seconds:.1f} s"]
    if casts:
        facts.append(f"cast {casts}")
    if verified:
        facts.append("verified")
    print_lines(f"{source} -> {report.path} ({report.format}): {', '.join(facts)}")
    for note in report.notes:
        print_lines(f"  {note}")
    if report.skipped:
        shown = ", ".join(report.skipped[:_MAX_SKIPPED])
        if len(report.skipped) > _MAX_SKIPPED:
            shown += ", ..."
        print_lines(f"  {len(report.skipped)} left out: {shown}")


_HEADS = ("changed", "largest", "mean", "relative")


def add_diff(parser: ArgumentParser) -> None:
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
    """Compare the tensors of A and B: which changed, by how much, in which layers.

    Settings that affect the output are compared, too. The exit code is 1 if they differ.
    """
    from ft_ckpt.checkpoint import hold_open
    from ft_ckpt.extensions.tools import by_layer, compare_files, compare_settings, open_source

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
        views.print_json(document)
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
    views.print_table(heads, rows)
    if len(unequal) > len(shown):
        print_lines(f"and {len(unequal) - len(shown)} more; see --top")


def _change_words(difference: "Difference") -> Iterator[str]:
    """For a layer the number of changed tensors; for a tensor its status, shapes and dtypes."""
    sides = [spec for spec in (difference.before, difference.after) if spec is not None]
    if not sides:
        yield f"{difference.changed} of {difference.tensors}"
        return
    if difference.status != "changed":
        yield difference.status
    yield " -> ".join(dict.fromkeys(views.human_shape(spec.shape) for spec in sides))
    yield " -> ".join(dict.fromkeys(spec.dtype for spec in sides))


def _change_figures(difference: "Difference") -> tuple[str, str, str]:
    sums = difference.sums
    if not sums.elements:  # none were comparable
        return "", "", ""
    largest = f"{sums.largest:.3g}"
    if sums.unbounded:
        largest += f" ({sums.unbounded} not finite)"
    relative = f"{difference.relative:.3g}" if math.isfinite(difference.relative) else "-"
    return largest, f"{difference.mean:.3g}", relative


def _difference_json(difference: "Difference") -> dict[str, Any]:
    sides: dict[str, Any] = {}
    for side, spec in (("a", difference.before), ("b", difference.after)):
        if spec is not None:
            sides[side] = {"shape": list(spec.shape), "dtype": spec.dtype}
    if not sides:
        sides = {"tensors": difference.tensors, "changed": difference.changed}
    has_elements = difference.sums.elements > 0
    is_relative = has_elements and math.isfinite(difference.relative)
    return {
        "name": difference.name,
        "status": difference.status,
        **sides,
        "largest": difference.sums.largest if has_elements else None,
        "mean": difference.mean if has_elements else None,
        "relative": difference.relative if is_relative else None,
        "not_finite": difference.sums.unbounded,
    }


_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # settings of glibc's allocator
_KEPT_BYTES = 1 << 30


def add_merge(parser: ArgumentParser) -> None:
    parser.add_argument("source", metavar="ADAPTER", help="Adapter, or a checkpoint with adapters.")
    parser.add_argument("target", metavar="OUT", help="Folder to write the merged model to.")
    parser.add_argument(
        "--base", help="Folder of the base model (default: the one that the adapter names)."
    )
    parser.add_argument(
        "--adapter",
        action="append",
        metavar="NAME",
        help="Merge only the adapter of this name; may be repeated.",
    )
    parser.add_argument("--weights", help='Weight of each adapter, as in "0.7,0.3".')
    parser.add_argument(
        "--check",
        action="store_true",
        help="Compare the logits of both models before OUT is written.",
    )
    parser.add_argument(
        "--any-base",
        action="store_true",
        help="Skip the check that the base is the one of the training.",
    )
    _add_output_options(parser)
    parser.set_defaults(run=_merge)


def _merge(options: Namespace) -> None:
    """Merge ADAPTER into its base model and write the result to the folder OUT.

    It is computed layer by layer in float32 and rounded once.
    """
    refuse_existing(options.target, options.force)
    _keep_freed_memory()
    from ft_ckpt.extensions.tools import merge, parse_weights

    report = merge(
        options.source,
        options.target,
        base=options.base,
        adapters=options.adapter,
        weights=parse_weights(options.weights),
        format=options.format,
        dtype=options.dtype,
        max_shard_size=options.max_shard_size,
        check="logits" if options.check else None,
        check_base=not options.any_base,
        overwrite=options.force,
    )
    print_conversion(options.source, report, False, as_json=options.as_json)


def _keep_freed_memory() -> None:
    """Let the allocator of this process keep freed memory: the next layer needs as much, and new
    pages are slow.
    """
    with suppress(AttributeError, OSError):  # another allocator
        libc = ctypes.CDLL(None)
        for setting in (_MMAP_THRESHOLD, _TRIM_THRESHOLD):
            libc.mallopt(setting, _KEPT_BYTES)


def add_average(parser: ArgumentParser) -> None:
    parser.add_argument(
        "sources", metavar="A", nargs="+", help="Checkpoints; with --last, the folder of a run."
    )
    parser.add_argument("target", metavar="OUT", help="File or folder to write.")
    parser.add_argument(
        "--weights", help='Weight of each checkpoint, as in "1,2,1" (default: equal).'
    )
    parser.add_argument(
        "--last",
        type=bounded(int, 1),
        metavar="N",
        help="Average the N newest valid checkpoints of a run.",
    )
    _add_verify(parser)
    _add_output_options(parser)
    parser.set_defaults(run=_average)


def _average(options: Namespace) -> None:
    """Write the average of the weights of the checkpoints A, B, ... to OUT.

    It is computed in float32 and rounded once; adapters are averaged factor by factor.
    """
    refuse_existing(options.target, options.force)
    from ft_ckpt.extensions.tools import average, parse_weights

    report = average(
        options.sources,
        options.target,
        weights=parse_weights(options.weights),
        last=options.last,
        format=options.format,
        dtype=options.dtype,
        max_shard_size=options.max_shard_size,
        verify=options.verify,
        overwrite=options.force,
    )
    print_conversion(", ".join(options.sources), report, options.verify, as_json=options.as_json)
