"""`ft-ckpt verify PATH`: a checkpoint, every checkpoint of a run, or weights that others wrote."""

from typing import Annotated

import typer

from ft_ckpt.checkpoint import catalog, foreign
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME
from ft_ckpt.checkpoint.verify_file import verify_listed
from ft_ckpt.cli import views
from ft_ckpt.cli.arguments import only_place
from ft_ckpt.cli.options import JsonOption
from ft_ckpt.errors import ManifestError, NotACheckpointError, UnreadableError
from ft_ckpt.storage.place import Place
from ft_ckpt.storage.store import Store

_Fast = Annotated[bool, typer.Option("--fast", help="Names, sizes and headers only; do not read every byte.")]
_UNCHECKED = "; headers and indexes hold together, values were not compared"


def verify_command(context: typer.Context, fast: _Fast = False, as_json: JsonOption = False) -> None:
    """Compare the checkpoint PATH, or all of the run PATH, with their manifests; exit code 1 if they differ.

    A file of a checkpoint is compared with its manifest, too. Of safetensors files and folders without a manifest,
    headers, indexes and configs are checked.
    """
    place = only_place(context)
    if not place.exists:
        raise NotACheckpointError(f"{place}: no such file or folder")
    found = _checkpoints_at(place.folder)
    listed = None if found or fast else verify_listed(place)
    reports = [_report_on(each, deep=not fast) for each in found] or [listed or foreign.verify_foreign(place)]
    note = "" if found or listed or not reports[0].ok else _UNCHECKED
    views.show_reports(reports, note, as_json=as_json)
    raise typer.Exit(0 if all(report.ok for report in reports) else 1)


def _checkpoints_at(store: Store) -> list[Store]:
    """The folder itself, if something was committed there, and those directly below it where something was."""
    folders = store.list_folder().folders
    below = sorted(each.name for each in folders if not each.name.startswith(".") and not each.is_link)
    here = [info.store for info in catalog.discover(Place(store))]  # in their order; then those that cannot be read
    stores = [store, *(store.within(name) for name in below)]
    return [*here, *(one for one in stores if one not in here and _may_be_one(one))]


def _may_be_one(store: Store) -> bool:
    try:
        return store.stat(MANIFEST_NAME) is not None
    except UnreadableError:
        return True


def _report_on(store: Store, *, deep: bool) -> catalog.VerifyReport:
    place = Place(store)
    try:
        return catalog.verify(place, deep=deep)
    except (ManifestError, OSError) as error:
        return catalog.VerifyReport(place.location, False, (str(error),), 0, 0)
