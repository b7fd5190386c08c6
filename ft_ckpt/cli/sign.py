"""The command `sign`."""

import os
from argparse import ArgumentParser, Namespace

from ft_ckpt.cli import output
from ft_ckpt.cli.options import add_json, print_lines
from ft_ckpt.errors import ConfigError
from ft_ckpt.extensions.transfer.copies import sign

_PASSWORD = "FT_CKPT_SIGN_PASSWORD"  # noqa: S105 - the name of a variable


def add_sign(parser: ArgumentParser) -> None:
    parser.description = (
        "Verify CHECKPOINT, then write its signature model.sig in OpenSSF's model-signing format."
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="Checkpoint in a local folder.")
    parser.add_argument(
        "--key",
        metavar="PRIVATE",
        help=f"Private key (a PEM file). Its password is read from {_PASSWORD}.",
    )
    parser.add_argument(
        "--keyless",
        action="store_true",
        help="Sign with an identity instead of a key, by Sigstore.",
    )
    parser.add_argument(
        "--identity-provider", metavar="URL", help="With --keyless: URL to log in at."
    )
    add_json(parser)
    parser.set_defaults(run=_sign)


def _sign(options: Namespace) -> None:
    has_one_way = (options.key is None) == options.keyless
    has_stray_provider = options.identity_provider and not options.keyless
    if not has_one_way or has_stray_provider:
        raise ConfigError(
            "sign: expected --key PRIVATE, or --keyless with or without --identity-provider"
        )

    password = os.environ.get(_PASSWORD)
    signature = sign(
        options.checkpoint, options.key, password=password, provider=options.identity_provider
    )
    if options.as_json:
        output.print_json({"path": options.checkpoint, "signature": str(signature)})
    else:
        print_lines(f"{options.checkpoint} -> {signature}")
