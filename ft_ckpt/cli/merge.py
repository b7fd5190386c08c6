"""`ft-ckpt merge ADAPTER OUT`. Torch is imported when there is work for it."""

import ctypes
from contextlib import suppress
from typing import Annotated

import typer

from ft_ckpt.cli.arguments import given_paths
from ft_ckpt.cli.convert import print_conversion, refuse_existing
from ft_ckpt.cli.options import DtypeOption, ForceOption, FormatOption, JsonOption, ShardOption

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
    from ft_ckpt.files.average import parse_weights
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
