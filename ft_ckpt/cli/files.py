"""The commands `convert` and `average`.

It also has the options and the output that all commands share that write weights.
"""

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from ft_ckpt.cli import output
from ft_ckpt.cli.options import add_force, add_json, bounded, print_lines
from ft_ckpt.errors import TargetError
from ft_ckpt.formats import written_formats
from ft_ckpt.storage.places import open_place
from ft_ckpt.values import human_size

if TYPE_CHECKING:
    from ft_ckpt.extensions.tools.converting import ConvertReport

# how many of the values that were left out are named
_MAX_NAMED = 8


def add_output_options(parser: ArgumentParser) -> None:
    """Declare the options of a command that writes weights."""
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
    parser.description = (
        "Write the weights of SRC to DST in another format or dtype. DST is a file with the suffix "
        "of its format, or a folder."
    )
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
    add_output_options(parser)
    parser.set_defaults(run=_convert)


def _convert(options: Namespace) -> None:
    refuse_existing(options.target, options.force)
    from ft_ckpt.extensions.tools.converting import convert

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


def print_conversion(
    source: str, report: "ConvertReport", verified: bool, *, as_json: bool
) -> None:
    """Print what was written from `source`, in a line or as JSON."""
    if as_json:
        output.print_json({**vars(report), "verified": verified})
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
        shown = ", ".join(report.skipped[:_MAX_NAMED])
        if len(report.skipped) > _MAX_NAMED:
            shown += ", ..."
        print_lines(f"  {len(report.skipped)} left out: {shown}")


def add_average(parser: ArgumentParser) -> None:
    parser.description = (
        "Write the average of the weights of the checkpoints A, B, ... to OUT. It is computed in "
        "float32 and rounded once; adapters are averaged factor by factor."
    )
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
    add_output_options(parser)
    parser.set_defaults(run=_average)


def _average(options: Namespace) -> None:
    refuse_existing(options.target, options.force)
    from ft_ckpt.extensions.tools.averaging import average, parse_weights

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
