"""The commands `ls`, `latest`, `best`, `show` and `verify`."""

from argparse import ArgumentParser, Namespace

from ft_ckpt.checkpoint import catalog, verify
from ft_ckpt.checkpoint.catalog import CheckpointInfo
from ft_ckpt.checkpoint.contents import why_no_checkpoint
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME
from ft_ckpt.checkpoint.signature import SignedBy
from ft_ckpt.checkpoint.verify import verify_listed
from ft_ckpt.cli import views
from ft_ckpt.cli.options import add_json
from ft_ckpt.errors import ConfigError, ManifestError, NotACheckpointError, UnreadableError
from ft_ckpt.retention import name_metrics
from ft_ckpt.storage.place import Place, open_place
from ft_ckpt.storage.store import Store

_UNCHECKED = "; headers and indexes are consistent, values were not compared"


def run_folder(location: str) -> Place:
    """The folder of a run. Raises NotACheckpointError when it does not exist."""
    run = open_place(location)
    if not run.is_folder:
        raise NotACheckpointError(f"{run}: no such folder; give one that holds checkpoints")
    return run


def run_checkpoints_in(run: Place) -> list[CheckpointInfo]:
    """The checkpoints of a run. Raises NotACheckpointError when the folder is a checkpoint itself."""
    infos = catalog.run_checkpoints(run)
    if not infos and run.folder.stat(MANIFEST_NAME) is not None:
        raise NotACheckpointError(f"{run}: a checkpoint, expected the folder of a run; `ft-ckpt show` shows one")
    return infos


def add_ls(parser: ArgumentParser) -> None:
    parser.add_argument("run_folder", metavar="RUN", help="Folder of the run.")
    parser.add_argument("--metrics", action="store_true", help="Show all metrics; else the two most important.")
    add_json(parser)
    parser.set_defaults(run=_ls)


def _ls(options: Namespace) -> None:
    """List the checkpoints of the folder RUN, oldest first."""
    run = run_folder(options.run_folder)
    infos = catalog.discover(run)
    rows = [views.checkpoint_row(info, catalog.verify(info.place, deep=False)) for info in infos]
    metrics = views.ranked_metrics(infos)[: None if options.metrics else 2]
    views.show_run(run, rows, metrics, as_json=options.as_json)


def add_latest(parser: ArgumentParser) -> None:
    parser.add_argument("run_folder", metavar="RUN", help="Folder of the run.")
    add_json(parser)
    parser.set_defaults(run=_latest)


def _latest(options: Namespace) -> None:
    """Print the newest valid checkpoint of the folder RUN."""
    run = run_folder(options.run_folder)
    found = catalog.find_latest(run)
    if found is None:
        raise NotACheckpointError(f"{run}: no valid checkpoint in it; `ft-ckpt ls` and `ft-ckpt verify` say why")
    views.show_latest(found, as_json=options.as_json)


def add_best(parser: ArgumentParser) -> None:
    parser.add_argument("run_folder", metavar="RUN", help="Folder of the run.")
    parser.add_argument("--metric", help='Name of the metric, as in "eval_loss" or "eval_loss:min".')
    add_json(parser)
    parser.set_defaults(run=_best)


def _best(options: Namespace) -> None:
    """Print the valid checkpoint of the folder RUN with the best metric; without --metric, by the metric that the
    run's own rules rank by."""
    run = run_folder(options.run_folder)
    name, _, mode = (options.metric or "").rpartition(":")
    found = catalog.find_best(run, (name, mode) if mode in ("min", "max") and name else options.metric)
    if found is None and options.metric is None:
        raise NotACheckpointError(f"{run}: no valid checkpoint with that metric in it; `ft-ckpt ls` lists the metrics")
    if found is None:
        measured = {metric for info in catalog.list_checkpoints(run).found for metric in info.metrics}
        asked = name if mode in ("min", "max") and name else options.metric
        raise NotACheckpointError(f"{run}: no valid checkpoint with the metric {name_metrics([asked], measured)}")
    views.show_latest(found, as_json=options.as_json)


def add_show(parser: ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="Checkpoint, weight file, or folder of another program.")
    add_json(parser)
    parser.set_defaults(run=_show)


def _show(options: Namespace) -> None:
    """List the parts and tensors of the checkpoint PATH, or the tensors of a weight file or foreign folder."""
    place = open_place(options.path)
    store = place.folder
    committed = store.stat(MANIFEST_NAME) is not None
    if not place.exists or (not committed and catalog.discover(place)):
        raise NotACheckpointError(why_no_checkpoint(place))
    if not committed:
        from ft_ckpt.cli.files import show_file

        show_file(place, as_json=options.as_json)
        return
    views.show_checkpoint(CheckpointInfo(store, catalog.load_manifest(store)), as_json=options.as_json)


def add_verify(parser: ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="Checkpoint, run, or weight file.")
    parser.add_argument("--fast", action="store_true", help="Names, sizes and headers only; do not read every byte.")
    parser.add_argument("--signed-by", metavar="PUBLIC", help="Check the signature, too: PEM file of the public key.")
    parser.add_argument("--identity", help="Signer of a keyless signature, such as name@example.org.")
    parser.add_argument("--identity-provider", metavar="URL", help="URL of the identity provider.")
    add_json(parser)
    parser.set_defaults(run=_verify)


def _verify(options: Namespace) -> int:
    """Compare the checkpoint PATH, or all of the run PATH, with their manifests; exit code 1 if they differ. A file of
    a checkpoint is compared with its manifest, too. Of safetensors files and folders without a manifest, headers,
    indexes and configs are checked. With --signed-by, a checkpoint without this signature fails.
    """
    signed_by = _wanted_signer(options)
    place, deep = open_place(options.path), not options.fast
    if not place.exists:
        raise NotACheckpointError(f"{place}: no such file or folder")
    found = _checkpoints_at(place.folder)
    if signed_by is not None and not found:
        raise NotACheckpointError(f"{place}: no checkpoint, so it has no signature to check")
    listed = verify_listed(place) if deep and not found else None
    reports = [_report_on(each, deep, signed_by) for each in found] or [listed or verify.verify_foreign(place)]
    note = "" if found or listed or not reports[0].ok else _UNCHECKED
    views.show_reports(reports, note, as_json=options.as_json)
    return 0 if all(report.ok for report in reports) else 1


def _wanted_signer(options: Namespace) -> SignedBy | None:
    keyless = options.identity, options.identity_provider
    if (options.signed_by is not None and any(keyless)) or any(keyless) != all(keyless):
        raise ConfigError("verify: expected --signed-by, or both of --identity and --identity-provider")
    return keyless if all(keyless) else options.signed_by


def _checkpoints_at(store: Store) -> list[Store]:
    """The folder itself and those directly below it, if they have a manifest or cannot be read."""
    folders = store.list_folder().folders
    below = sorted(each.name for each in folders if not each.name.startswith(".") and not each.is_link)
    here = [info.store for info in catalog.discover(Place(store))]  # in order of steps; unreadable checkpoints follow
    stores = [store, *(store.within(name) for name in below)]
    return [*here, *(each for each in stores if each not in here and _may_be_checkpoint(each))]


def _may_be_checkpoint(store: Store) -> bool:
    try:
        return store.stat(MANIFEST_NAME) is not None
    except UnreadableError:
        return True


def _report_on(store: Store, deep: bool, signed_by: SignedBy | None) -> catalog.VerifyReport:
    place = Place(store)
    try:
        return catalog.verify(place, deep=deep, signed_by=signed_by)
    except (ManifestError, OSError) as error:
        return catalog.VerifyReport(place.location, False, (str(error),), 0, 0)
