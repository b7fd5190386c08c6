"""Replaces the full weights of servers in place, and proves that they hold them.

The endpoints have no lock. Between any two requests a server may restart, and another publisher may
begin. So when all servers have resumed, their digests, lists and versions are read once more before
a success is reported.
"""

import time
from collections.abc import Sequence
from contextlib import suppress

from ft_ckpt.errors import CheckpointError, EngineError, listing
from ft_ckpt.extensions.rl.engines import Server, is_known, is_unreported, packed_layers, probe
from ft_ckpt.extensions.rl.limits import compare_configs
from ft_ckpt.extensions.rl.publishing.on_servers import errors_on
from ft_ckpt.extensions.rl.publishing.reports import PublishReport, ServerReport
from ft_ckpt.extensions.rl.publishing.source import PublishedPart, config_in
from ft_ckpt.extensions.rl.publishing.weights_before import open_weights_before, put_all_back
from ft_ckpt.extensions.rl.publishing.weights_update import (
    VERSION_ONLY,
    Update,
    Weights,
    base_folder_of_server,
    difference,
    expect_last_version,
    expect_version,
    expect_weights,
    resume,
    unlike_servers,
)
from ft_ckpt.formats.files import TensorFile
from ft_ckpt.messages import LOG
from ft_ckpt.storage.local import LocalStore


def publish_weights(
    servers: Sequence[Server], part: PublishedPart, file: TensorFile
) -> PublishReport:
    """Load the weights on all servers, and prove that they hold them.

    The servers are paused, load the weights, are compared, report the new version, resume, and are
    compared once more. After a failure all servers are restored. Raises EngineError.
    """
    weights = Weights(
        version=part.weights_version,
        folder=part.served_folder(),
        checkpoint=part.checkpoint.path,
        file=file,
        config=part.config(),
        options=part.options,
        part=part.record.name,
    )
    updates = [Update(server) for server in servers]
    problems = errors_on(updates, _prepare, weights)
    if problems:
        raise EngineError(
            f"{listing(problems)}; nothing was loaded, all servers hold what they held before"
        )

    _update_all(updates, weights)
    return PublishReport(
        path=part.checkpoint.location,
        kind="weights",
        name=updates[0].base,
        version=weights.version,
        servers=tuple(_report(update) for update in updates),
        seconds=0.0,
    )


def _update_all(updates: Sequence[Update], weights: Weights) -> None:
    """Replace the weights of all servers. After a failure restore them.

    Raises EngineError that says what the servers hold then.
    """
    new = [update for update in updates if update.is_new]
    restored: list[str] = []
    try:
        problems = errors_on(new, _load_weights, weights)
        if not problems:
            problems = unlike_servers(updates)
        if not problems:
            problems = errors_on(new, _set_version, weights)
        if problems:
            restored = put_all_back(new, weights)
    except BaseException:  # such as KeyboardInterrupt
        outcomes = put_all_back(new, weights)
        LOG.warning("%s: publish interrupted: %s", weights.version, listing(outcomes))
        raise
    finally:
        still_paused = errors_on(new, resume)

    if not problems:
        problems = _compare_again(updates, weights)
        if problems:
            try:
                restored = put_all_back(new, weights)
            finally:
                still_paused = errors_on(new, resume)

    if problems:
        outcomes = restored or ["all servers hold what they held before"]
        raise EngineError("; ".join([*problems, *outcomes, *still_paused]))

    if still_paused:
        raise EngineError(f"{listing(still_paused)}; all servers hold {weights.version}")


def _report(update: Update) -> ServerReport:
    return ServerReport(
        url=update.url,
        engine=f"{update.server.engine} {update.server.version}",
        before=update.before,
        is_new=update.is_new,
        checked="; ".join([update.checked, *update.notes]),
        paused_seconds=update.paused_seconds,
    )


def _prepare(update: Update, weights: Weights) -> None:
    """Find out which weights the server holds, and whether they must be replaced.

    Raises EngineError if the served model has another config.
    """
    server = update.server
    served = server.served()
    update.before = server.weight_version()
    update.base, update.base_path = served.base, served.base_path
    _refuse_other_config(update, weights)
    if update.before == weights.version:
        # A publisher that was killed may have left the server paused.
        update.paused_at = time.monotonic()
        resume(update)
        update.paused_seconds = 0.0
        # A version that the caller gave does not prove which weights the server holds. Other
        # versions do, because they have the digest of the manifest.
        is_different = difference(update, weights) is not None
        is_compared = update.checked != VERSION_ONLY and not update.is_partly_compared
        has_digest_in_version = weights.options.version is None
        is_proven = is_compared or has_digest_in_version
        update.is_new = is_different or not is_proven

    if update.is_new:
        _learn_layout(update, weights)


def _refuse_other_config(update: Update, weights: Weights) -> None:
    """Raise EngineError if the server built its model from another config when it started."""
    base = base_folder_of_server(update, weights.options)
    if base is None:
        path = update.base_path or "the path of the served model"
        update.notes.append(
            f"its config was not compared: {path} is not a folder here; see visible_at="
        )
        return

    served_config = config_in(LocalStore(base))
    differences, token_differences = compare_configs(served_config, weights.config)
    if differences:
        raise EngineError(
            f"{update.url}: config.json: {listing(differences, '; ', 3)} ({base}; new weights: "
            f"{weights.folder}); a server keeps the config of its start; start a "
            "server with this model"
        )

    if token_differences:
        update.notes.append(f"it keeps its own token ids: {token_differences[0]}")


def _learn_layout(update: Update, weights: Weights) -> None:
    """Find out which layers the server keeps in another layout than files.

    Its current weights are compared with their files for this.
    """
    server = update.server
    if weights.options.check == "listed" or not is_known(weights.config):
        return
    reported = server.digests()
    if not reported:
        return
    with suppress(CheckpointError, OSError), open_weights_before(update, weights) as before:
        if isinstance(before, Weights):
            update.packed = packed_layers(reported, before.file, before.config)
    is_packed = bool(update.packed) or any(map(is_unreported, reported.values()))
    if is_packed and not server.is_paused():
        update.answers = probe(server, update.base)


def _load_weights(update: Update, weights: Weights) -> None:
    server = update.server
    # If the version has changed, another publisher may have paused the server.
    expect_version(update, update.before)
    update.paused_at = time.monotonic()
    server.pause(weights.options.in_flight)
    update.has_begun = True
    server.set_weight_version(weights.loading_version)
    update.has_loaded = True
    server.load_weights(weights.folder.path_on_servers)
    wrong = difference(update, weights)
    if wrong:
        raise EngineError(wrong)


def _set_version(update: Update, weights: Weights) -> None:
    expect_version(update, weights.loading_version)
    update.server.set_weight_version(weights.version)


def _compare_again(updates: Sequence[Update], weights: Weights) -> list[str]:
    """Return a line for each server that no longer holds the weights.

    Versions are read last, because a restart resets them.
    """
    problems = errors_on(updates, expect_weights, weights)
    if problems:
        return problems
    return errors_on(updates, expect_last_version, weights)
