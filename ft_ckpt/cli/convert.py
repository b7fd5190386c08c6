"""`ft-ckpt convert SRC DST`, and what `ft-ckpt show` says of a file. Torch is imported when there is work for it."""

import dataclasses
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ft_ckpt.cli import views
from ft_ckpt.cli.arguments import given_paths
from ft_ckpt.cli.options import DtypeOption, ForceOption, FormatOption, JsonOption, ShardOption, VerifyOption
from ft_ckpt.cli.streams import print_lines
from ft_ckpt.config import human_size
from ft_ckpt.errors import TargetError
from ft_ckpt.storage.place import Place, open_place

if TYPE_CHECKING:
    from ft_ckpt.files.convert import ConvertReport
    from ft_ckpt.formats.layout import Spec

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
    from ft_ckpt.files.convert import convert as run

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
    from ft_ckpt.files.convert import open_source

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
