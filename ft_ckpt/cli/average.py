"""`ft-ckpt average A B C OUT`. Torch is imported when there is work for it."""

from typing import Annotated

import typer

from ft_ckpt.cli.arguments import several_paths
from ft_ckpt.cli.convert import print_conversion, refuse_existing
from ft_ckpt.cli.options import DtypeOption, ForceOption, FormatOption, JsonOption, ShardOption, VerifyOption

_Weights = Annotated[str | None, typer.Option(help='A number for each source, as in "1,2,1"; else all count alike.')]
_Last = Annotated[int | None, typer.Option(help="Of one RUN, its so many newest valid checkpoints.")]


def average_command(
    context: typer.Context,
    weights: _Weights = None,
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
    from ft_ckpt.files.average import average, parse_weights

    report = average(
        sources, target, weights=parse_weights(weights), last=last, format=format, dtype=dtype,
        max_shard_size=max_shard_size, verify=verify, overwrite=force,
    )  # fmt: skip
    print_conversion(", ".join(sources), report, verify, as_json=as_json)
