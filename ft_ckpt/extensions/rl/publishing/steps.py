"""Publishes a committed checkpoint into running inference servers, and proves that they hold it."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from typing_extensions import Unpack

from ft_ckpt.errors import LoadError, listing
from ft_ckpt.extensions.rl.deltas import append_checkpoint
from ft_ckpt.extensions.rl.engines import (
    Server,
    ServerOptions,
    ServerSettings,
    connect,
    server_options,
)
from ft_ckpt.extensions.rl.limits import compare_base, findings
from ft_ckpt.extensions.rl.publishing.adapter import publish_adapter
from ft_ckpt.extensions.rl.publishing.reports import PublishReport, ServerReport
from ft_ckpt.extensions.rl.publishing.source import (
    PublishedPart,
    checkpoint_place,
    drop_rebuilt_entries,
    open_published,
    path_on_this_machine,
    run_of,
)
from ft_ckpt.extensions.rl.publishing.weights import publish_weights
from ft_ckpt.extensions.rl.publishing.weights_update import FIRST_VERSION
from ft_ckpt.formats.files import TensorFile
from ft_ckpt.storage.places import Place, location_name, open_place

_ANY_RANK = 1 << 20  # no limit here, because the server checks its own limit


def publish(
    checkpoint: str | Path | Place,
    url: str | Sequence[str] | ServerOptions,
    **settings: Unpack[ServerSettings],
) -> PublishReport:
    """Load the committed `checkpoint` into running servers, and prove that they hold it.

    `url` is the address of one server, or of several. They run vLLM, SGLang or another engine with
    SGLang's endpoints. `settings` are the fields of `ServerOptions`. An object of that class may be
    given instead of `url` and `settings`.

    When the call returns, all servers hold the checkpoint. After a failure, each server is restored
    to its previous state, and the error says what it holds now. The digests of all files are
    compared first. The checkpoint is leased until the servers have answered, so that no retention
    rule deletes it.

    An adapter is loaded as `name`@`version`, for example "policy@500-3fa9c1d2", and never loaded
    again under this name. It is refused before the load if the engine would drop or misread part of
    it. After the load, the server must list it, and its answers to three prompts must differ from
    those of the base. With `base`, they must also match those of transformers and PEFT. Of the
    older versions under `name`, the `keep` newest stay loaded.

    Full weights are loaded in place. The server is paused, reads the files, drops its caches and
    reports the SHA-256 of its parameters, which are compared with those of the files. Then it
    resumes.

    With `delta`, `url` is a chain of deltas: a folder, or the URL of one in a bucket. The
    checkpoint is appended to it. An entry of the chain has only the elements that differ from the
    entry before. It has the whole checkpoint every `anchor_every` entries, and if the difference
    has more than half of the checkpoint's bytes. When an entry is published to a server, its
    checkpoint is rebuilt in `stage`, byte for byte. The two newest rebuilt checkpoints are kept.
    The report has one "server", which is the entry.

    Raises ConfigError for invalid arguments and unsupported servers, and NotACheckpointError or
    CorruptError for the checkpoint. Raises LoadError naming everything that the engine would
    misread. Raises EngineError if a server refuses, does not answer or holds something else.
    """
    start = time.monotonic()
    options = server_options(url, settings)
    place = checkpoint_place(checkpoint)
    if options.delta:
        return append_to_chain(place, open_place(options.url[0]), options)
    servers = [connect(client) for client in options.clients()]
    with open_published(place, servers, options) as part, part.opened_file() as file:
        uncompared = refuse_misread(servers, part, file)
        report = publish_part(servers, part, file, uncompared)
    drop_rebuilt_entries(place, options)
    seconds = time.monotonic() - start
    return dataclasses.replace(report, path=place.location, seconds=seconds)


def append_to_chain(place: Place, chain: Place, options: ServerOptions) -> PublishReport:
    """Append the checkpoint to a chain of deltas. Returns a report with the new entry."""
    appended = append_checkpoint(place, chain, options.anchor_every)
    version = location_name(appended.path)
    share = appended.bytes / max(1, appended.full_bytes)
    entry = ServerReport(
        url=str(appended.path),
        engine=appended.kind,
        before=appended.base,
        is_new=appended.is_new,
        checked=f"{appended.bytes:,} of {appended.full_bytes:,} bytes, {share:.1%}",
    )
    return PublishReport(
        path=place.location,
        kind=appended.kind,
        name=run_of(Place(chain.folder, version)),
        version=version,
        servers=(entry,),
        seconds=appended.seconds,
    )


def refuse_misread(
    servers: Sequence[Server], part: PublishedPart, file: TensorFile
) -> dict[str, str]:
    """Raise LoadError naming everything that the servers would misread.

    Returns, by URL, the reason why the base of the adapter was not compared with the server's.
    """
    problems: list[str] = []
    for engine in sorted({server.engine.lower() for server in servers}):
        problems += findings(engine, part.place.folder, file, _ANY_RANK)
    uncompared = {}
    if part.is_adapter:
        for server in servers:
            base_problems, reason = _compare_base_of(server, part)
            problems += base_problems
            if reason:
                uncompared[server.client.url] = reason

    if problems:
        distinct = list(dict.fromkeys(problems))
        raise LoadError(f"{part.checkpoint.path}: not published: {listing(distinct)}")

    return uncompared


def publish_part(
    servers: Sequence[Server],
    part: PublishedPart,
    file: TensorFile,
    uncompared: Mapping[str, str],
) -> PublishReport:
    """Load the part on all servers and prove that they hold it, or restore them."""
    if part.is_adapter:
        return publish_adapter(servers, part, file, uncompared)
    return publish_weights(servers, part, file)


def _compare_base_of(server: Server, part: PublishedPart) -> tuple[list[str], str]:
    """Compare the adapter's base with the server's; see `compare_base`.

    The files of the server's base are those of its initial weights. So nothing is compared if its
    weights were replaced.
    """
    version = server.weight_version()
    if version not in (None, FIRST_VERSION):
        return [], f"the server holds the weights {version}"
    base_path = path_on_this_machine(server.served().base_path, part.options.visible_at)
    return compare_base(part.record, base_path)
