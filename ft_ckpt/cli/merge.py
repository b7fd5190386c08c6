"""The command `merge`."""

import ctypes
from argparse import ArgumentParser, Namespace
from contextlib import suppress

from ft_ckpt.cli.files import add_output_options, print_conversion, refuse_existing

# Numbers of settings of glibc's allocator.
_MMAP_THRESHOLD = -3
_TRIM_THRESHOLD = -1
_KEPT_BYTES = 1 << 30


def add_merge(parser: ArgumentParser) -> None:
    parser.description = (
        "Merge ADAPTER into its base model and write the result to the folder OUT. It is computed "
        "layer by layer in float32 and rounded once."
    )
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
    add_output_options(parser)
    parser.set_defaults(run=_merge)


def _merge(options: Namespace) -> None:
    refuse_existing(options.target, options.force)
    _keep_freed_memory()
    from ft_ckpt.extensions.tools.averaging import parse_weights
    from ft_ckpt.extensions.tools.merging import merge

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
    """Let the allocator of this process keep freed memory.

    The next layer needs as much memory, and it takes time to get new pages from the system.
    """
    with suppress(AttributeError, OSError):  # another allocator
        libc = ctypes.CDLL(None)
        for setting in (_MMAP_THRESHOLD, _TRIM_THRESHOLD):
            libc.mallopt(setting, _KEPT_BYTES)
