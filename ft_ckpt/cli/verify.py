"""`ft-ckpt verify PATH`: a checkpoint, every checkpoint of a run, or weights that others wrote."""

from pathlib import Path
from typing import Annotated

import typer

from ft_ckpt.checkpoint import catalog, foreign
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME
from ft_ckpt.cli import views
from ft_ckpt.cli.arguments import only_path
from ft_ckpt.errors import ManifestError, NotACheckpointError

_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_Fast = Annotated[bool, typer.Option("--fast", help="Names, sizes and headers only; do not read every byte.")]
_UNCHECKED = "; headers and indexes hold together, values were not recorded"


def verify_command(context: typer.Context, fast: _Fast = False, as_json: _Json = False) -> None:
    """Compare the checkpoint PATH, or all of the run PATH, with their manifests; exit code 1 if they differ.

    Of safetensors files and folders without a manifest, headers, indexes and configs are checked.
    """
    path = only_path(context)
    if not path.exists():
        raise NotACheckpointError(f"{path}: no such file or folder")
    found = _checkpoints_at(path)
    reports = [_report_on(each, deep=not fast) for each in found] or [foreign.verify_foreign(path)]
    note = "" if found or not reports[0].ok else _UNCHECKED
    views.show_reports(reports, note, as_json=as_json)
    raise typer.Exit(0 if all(report.ok for report in reports) else 1)


def _checkpoints_at(path: Path) -> list[Path]:
    """The folder itself, if something was committed there, and those directly below it where something was."""
    if not path.is_dir():
        return []
    below = sorted(one for one in path.iterdir() if not one.name.startswith(".") and not one.is_symlink())
    here = {info.path: None for info in catalog.discover(path)}  # in their order; then those that cannot be read
    return [*here, *(one for one in (path, *below) if (one / MANIFEST_NAME).is_file() and one not in here)]


def _report_on(path: Path, *, deep: bool) -> catalog.VerifyReport:
    try:
        return catalog.verify(path, deep=deep)
    except (ManifestError, OSError) as error:
        return catalog.VerifyReport(path, False, (str(error),), 0, 0)
