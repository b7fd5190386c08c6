"""The options that several commands take."""

from typing import Annotated

import typer

from ft_ckpt.formats.registry import written_formats

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_FORMATS = ", ".join(known.name for known in written_formats())
FormatOption = Annotated[str | None, typer.Option(help=f"Of {_FORMATS}; else by suffix.")]
DtypeOption = Annotated[
    str | None, typer.Option(help="Cast floating-point tensors to float64, float32, bfloat16, float16.")
]
ShardOption = Annotated[str | None, typer.Option(help='Largest weight file of a folder, as in "5GB".')]
VerifyOption = Annotated[bool, typer.Option("--verify", help="Read the result back and compare it, bit for bit.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace what is there already.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]
