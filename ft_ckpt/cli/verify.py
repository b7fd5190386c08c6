"""The command `verify`."""

from argparse import ArgumentParser, Namespace

from ft_ckpt.checkpoint.catalog import discover
from ft_ckpt.checkpoint.checks import SignedBy, VerifyReport, verify, verify_foreign, verify_listed
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME, RUNS, describe_contents, why_no_checkpoint
from ft_ckpt.cli import views
from ft_ckpt.cli.options import add_json
from ft_ckpt.errors import ConfigError, ManifestError, NotACheckpointError, UnreadableError
from ft_ckpt.storage import Store
from ft_ckpt.storage.places import Place, open_place

_UNCHECKED = "; headers and indexes are consistent, values were not compared"


def add_verify(parser: ArgumentParser) -> None:
    parser.description = (
        "Check that the files at PATH are as they were saved. They are those of a checkpoint, of "
        "all checkpoints of a run, or one file. The exit code is 1 if they are not. Folders of "
        "other programs have no recorded digests, so only headers, indexes and configs are checked "
        "there. With --signed-by, the check also fails if the signature is missing, or if any file "
        "was added, removed or changed since."
    )
    parser.add_argument(
        "path", metavar="PATH", help="Checkpoint, run, model folder or weight file."
    )
    parser.add_argument(
        "--fast",
        action="store_true",
        help="Check names, sizes and headers; skip the digests of large files.",
    )
    parser.add_argument(
        "--signed-by",
        metavar="PUBLIC",
        help="Also check the signature with this public key (a PEM file).",
    )
    parser.add_argument(
        "--identity", help="Also check a keyless signature: who signed, as in name@example.org."
    )
    parser.add_argument(
        "--identity-provider", metavar="URL", help="With --identity: where the signer logged in."
    )
    add_json(parser)
    parser.set_defaults(run=_verify)


def _verify(options: Namespace) -> int:
    signed_by = _signer(options)
    place, deep = open_place(options.path), not options.fast
    if not place.exists:
        raise NotACheckpointError(why_no_checkpoint(place))
    checkpoints = _checkpoints_at(place.folder)
    if not checkpoints and place.is_folder:
        contents = describe_contents(place)
        if contents.kind == RUNS:
            raise NotACheckpointError(contents.sentence(place))

    if signed_by is not None and not checkpoints:
        raise NotACheckpointError(f"{place}: no checkpoint, so it has no signature to check")
    note = ""
    reports = [_report_on(checkpoint, deep, signed_by) for checkpoint in checkpoints]
    if not checkpoints:
        listed = verify_listed(place) if deep else None
        reports = [listed or verify_foreign(place)]
        if listed is None and reports[0].ok:
            note = _UNCHECKED

    views.show_reports(reports, note, as_json=options.as_json)
    return 0 if all(report.ok for report in reports) else 1


def _signer(options: Namespace) -> SignedBy | None:
    keyless = options.identity, options.identity_provider
    is_incomplete = any(keyless) and not all(keyless)
    if is_incomplete or (any(keyless) and options.signed_by is not None):
        raise ConfigError(
            "verify: expected --signed-by, or both of --identity and --identity-provider"
        )
    return keyless if all(keyless) else options.signed_by


def _checkpoints_at(store: Store) -> list[Store]:
    """Return the folder and the folders directly in it, if they are checkpoints.

    A folder that cannot be read is returned, too. Its report then says so.
    """
    checkpoints = [info.store for info in discover(Place(store))]  # in order of steps
    folders = store.list_folder().folders
    names = [folder.name for folder in folders if not folder.is_link]
    visible = sorted(name for name in names if not name.startswith("."))
    candidates = [store, *(store.within(name) for name in visible)]
    unlisted = [candidate for candidate in candidates if candidate not in checkpoints]
    return checkpoints + [candidate for candidate in unlisted if _may_be_checkpoint(candidate)]


def _may_be_checkpoint(store: Store) -> bool:
    try:
        return store.stat(MANIFEST_NAME) is not None
    except UnreadableError:
        return True


def _report_on(store: Store, deep: bool, signed_by: SignedBy | None) -> VerifyReport:
    place = Place(store)
    try:
        return verify(place, deep=deep, signed_by=signed_by)
    except (ManifestError, OSError) as error:
        return VerifyReport(place.location, False, (str(error),), 0, 0)
