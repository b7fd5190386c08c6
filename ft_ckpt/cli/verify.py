"""`ft-ckpt verify PATH`: a checkpoint, every checkpoint of a run, or weights that others wrote."""

from pathlib import Path
from typing import Annotated

import typer

from ft_ckpt.checkpoint import catalog, foreign
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME
from ft_ckpt.cli import views
from ft_ckpt.cli.arguments import only_path
from ft_ckpt.cli.options import JsonOption
from ft_ckpt.errors import ManifestError, NotACheckpointError
from ft_ckpt.storage.local_store import LocalStore

_Fast = Annotated[bool, typer.Option("--fast", help="Names, sizes and headers only; do not read every byte.")]
_UNCHECKED = "; headers and indexes hold together, values were not recorded"


def verify_command(context: typer.Context, fast: _Fast = False, as_json: JsonOption = False) -> None:
    """Compare the checkpoint PATH, or all of the run PATH, with their manifests; exit code 1 if they differ.

    Of safetensors files and folders without a manifest, headers, indexes and configs are checked.
    """
    path = only_path(context)
    if not LocalStore(path).list_folder().exists:
        raise NotACheckpointError(f"{path}: no such file or folder")
    found = _checkpoints_at(path)
    reports = [_report_on(each, deep=not fast) for each in found] or [foreign.verify_foreign(path)]
    note = "" if found or not reports[0].ok else _UNCHECKED
    views.show_reports(reports, note, as_json=as_json)
    raise typer.Exit(0 if all(report.ok for report in reports) else 1)


def _checkpoints_at(path: Path) -> list[Path]:
    """The folder itself, if something was committed there, and those directly below it where something was."""
    store = LocalStore(path)
    folders = store.list_folder().folders
    below = sorted(each.name for each in folders if not each.name.startswith(".") and not each.is_link)
    here = {info.path: None for info in catalog.discover(path)}  # in their order; then those that cannot be read
    stores = {path: store, **{path / name: store.within(name) for name in below}}
    return [*here, *(one for one, at in stores.items() if at.stat(MANIFEST_NAME) is not None and one not in here)]


def _report_on(path: Path, *, deep: bool) -> catalog.VerifyReport:
    try:
        return catalog.verify(path, deep=deep)
    except (ManifestError, OSError) as error:
        return catalog.VerifyReport(path, False, (str(error),), 0, 0)
