"""Publish a committed checkpoint into running inference servers, and prove that they hold it.

Each version of an adapter gets its own name and is never loaded again under it, because the caches
of servers are keyed by name. Full weights are loaded in place while generation is paused. Meanwhile
the version that a server reports ends in "(loading)", so that no server reports weights that it
does not hold if the publisher is killed.

The endpoints have no lock: a server may restart, and another publisher may come, between any two
requests. So once all servers are done, digests, lists and versions are read again from all of them,
in one last look, before a success is reported.
"""

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from typing_extensions import Unpack

from ft_ckpt.checkpoint import MANIFEST_NAME, OpenCheckpoint, PartRecord, is_delta, open_checkpoint
from ft_ckpt.errors import (
    CheckpointError,
    ConfigError,
    CorruptError,
    EngineError,
    LoadError,
    NameTakenError,
    damaged_input,
    listing,
)
from ft_ckpt.extensions.rl.deltas import append_checkpoint, drop_rebuilt, is_staged, mark_staged
from ft_ckpt.extensions.rl.expected import (
    Comparison,
    PackedLayer,
    compare_digests,
    is_known,
    is_unreported,
    packed_layers,
)
from ft_ckpt.extensions.rl.exporting import export
from ft_ckpt.extensions.rl.options import ServerOptions, ServerSettings, server_options
from ft_ckpt.extensions.rl.preflight import compare_base, compare_configs, findings, needs_export
from ft_ckpt.extensions.rl.servers import Server, connect, probe
from ft_ckpt.extensions.transfer import pull
from ft_ckpt.formats import TensorFile
from ft_ckpt.messages import LOG
from ft_ckpt.model import open_folder
from ft_ckpt.storage import LocalStore, Place, Store, location_name, open_place, read_text

_RESUME_TRIES, _RESUME_PAUSE_SECONDS = 4, 1.0
_LOADING = " (loading)"  # after the version of a server whose weights are being replaced
_UNCHECKED = "the version only"
_UNREPORTED = "nothing: it reports neither digests nor a version"
_ANY_RANK = 1 << 20  # no limit here: the server checks its own
# of weights: run, checkpoint, head of its digest
_VERSION = re.compile(r"([^/]+)/([^/]+)#([0-9a-f]{16})", re.DOTALL)
_FIRST_VERSION = "default"  # the version that vLLM and SGLang report for their initial weights
_ALIKE = 1e-4  # log probabilities that differ by less count as equal
# error of log probabilities in bfloat16, against a reference in float32; the base's may double it
_NEAR = 0.1


@dataclass(frozen=True)
class ServerReport:
    """One server after a publish; for a chain its new entry, with the kind as `engine` and the base
    as `before`.
    """

    url: str
    engine: str
    """The engine and its version, such as "vLLM 0.32.0"."""
    before: str | None
    """The version of the previous weights; None for an adapter, and if the server reports none."""
    is_new: bool
    """False if the server already held this version, and nothing was loaded."""
    checked: str
    """The result of the comparison, such as "27 of 27 parameters equal to the files"."""
    paused_seconds: float = 0.0
    """How long generation was paused."""
    unloaded: tuple[str, ...] = ()
    """Older versions of the adapter that were unloaded."""


@dataclass(frozen=True)
class PublishReport:
    """A finished publish: every server holds the checkpoint."""

    path: Path | str
    """The checkpoint."""
    kind: str
    """"adapter" or "weights"; in a chain "anchor" or "delta"."""
    name: str
    """The model name for requests: the adapter's name with its version (on SGLang "BASE:NAME"), or
    the name of the base; of a chain its name.
    """
    version: str
    """The version: of an adapter the part after "@"; of weights the one that servers report; in a
    chain the entry.
    """
    servers: tuple[ServerReport, ...]
    """The servers, in the order of their URLs."""
    seconds: float
    """From the call to the last answer."""


def publish(
    checkpoint: str | Path | Place,
    url: str | Sequence[str] | ServerOptions,
    **settings: Unpack[ServerSettings],
) -> PublishReport:
    """Load the committed `checkpoint` into the running server at `url`, or into several, and prove
    that they hold it.

    Supports vLLM, SGLang, and servers with SGLang's endpoints. On return, all servers hold the
    checkpoint; after a failure each is restored to its previous state, and the error says what it
    holds now. The digests of all files are compared first, and the checkpoint is leased until the
    servers have answered. `settings` are the fields of `ServerOptions`, which may be given in place
    of `url` and them.

    An adapter is loaded as `name`@`version`, as in "policy@500-3fa9c1d2", and never loaded again
    under a name. It is refused beforehand if the engine would drop or misread part of it. Then the
    server must list it, and its answers to three prompts must differ from the base's; with `base`
    they must also match those of transformers and PEFT. Of older versions under `name`, the `keep`
    newest stay loaded.

    Full weights are loaded in place: the server is paused, reads the files, drops its caches,
    reports the SHA-256 of its parameters, which are compared with those of the files, and resumes.

    With `delta`, `url` is a chain (a folder, or the URL of one in a bucket), to which the
    checkpoint is appended: only the elements that differ from the newest entry, or the whole
    checkpoint, every `anchor_every` entries and if the difference has more than half of its bytes.
    When an entry is published to a server, its checkpoint is rebuilt in `stage`, byte for byte; the
    two newest are kept. The report has one "server", the entry.

    Raises ConfigError for invalid arguments and unsupported servers, NotACheckpointError or
    CorruptError for the checkpoint, LoadError naming everything that the engine would misread,
    EngineError if a server refuses, does not answer or holds something else.
    """
    options = server_options(url, settings)
    begun = time.monotonic()
    place, has_version = _checkpoint_place(checkpoint), options.version is not None
    if options.delta:
        return _append(place, open_place(options.url[0]), options)
    servers = [connect(client) for client in options.clients()]
    with _exported(place, servers, options) as (held, record, options):
        folder = _Folder.of(held.path / record.path, options)
        with closing(open_folder(Place(held.store, record.path))) as file:
            uncompared = _refuse_misread(servers, held, record, file, options)
            if record.kind == "adapter":
                reference = _reference(held, record, file, options)
                adapter = _Adapter(_adapter_name(held, options), folder, reference, has_version)
                reports = [
                    replace(
                        report,
                        checked=(
                            f"{report.checked}; its base was not compared: {uncompared[report.url]}"
                        ),
                    )
                    if report.url in uncompared
                    else report
                    for report in _publish_adapter(servers, adapter, options)
                ]
                kind, served, version = "adapter", adapter.name, adapter.name.partition("@")[2]
            else:
                version = options.version or _weights_version(held)
                config = _config_in(Place(held.store, record.path).folder)
                weights = _Weights(version, folder, held.path, file, config, options, record.name)
                served, reports = _publish_weights(servers, weights)
                kind = "weights"
    if options.stage is not None:
        _drop_rebuilt(place, options.stage)
    return PublishReport(
        place.location, kind, served, version, tuple(reports), time.monotonic() - begun
    )


def _checkpoint_place(checkpoint: Any) -> Place:
    is_path = isinstance(checkpoint, (str, os.PathLike, Place)) and str(checkpoint)
    if not is_path or "\0" in str(checkpoint):
        raise ConfigError(
            f"checkpoint={checkpoint!r}: expected the path, the URL or the Place of a checkpoint"
        )
    return open_place(checkpoint)


def _append(checkpoint: Place, chain: Place, options: ServerOptions) -> PublishReport:
    found = append_checkpoint(checkpoint, chain, options.anchor_every)
    share = (
        f"{found.bytes:,} of {found.full_bytes:,} bytes, "
        f"{found.bytes / max(1, found.full_bytes):.1%}"
    )
    entry = ServerReport(str(found.path), found.kind, found.base, found.is_new, share)
    return PublishReport(
        checkpoint.location,
        found.kind,
        _run_of(Place(open_place(found.path).folder)),
        location_name(found.path),
        (entry,),
        found.seconds,
    )


def _drop_rebuilt(entry: Place, stage: Path) -> None:
    """Delete checkpoints in the stage that were rebuilt from older entries of the chain; log a
    failure as a warning.
    """
    try:
        drop_rebuilt(Place(entry.absolute.beside), stage / _run_of(entry))
    except (CheckpointError, OSError) as error:
        LOG.warning("%s: rebuilt checkpoints were not deleted: %s", stage, error)


# The checkpoint


@contextmanager
def _exported(
    place: Place, servers: Sequence[Server], options: ServerOptions
) -> Iterator[tuple[OpenCheckpoint, PartRecord, ServerOptions]]:
    """As `_opened`; with `stage`, an adapter with patterns is replaced by its export in that
    folder.
    """
    with _opened(place, options) as (held, record):
        if options.name is None:
            options = replace(options, name=_default_name(place, held, record))
        store = Place(held.store, record.path).folder
        engines = sorted(
            {
                server.engine.lower()
                for server in servers
                if needs_export(server.engine.lower(), store)
            }
        )
        if options.stage is None or record.kind != "adapter" or not engines:
            yield held, record, options
            return
        name, _, version = _adapter_name(held, options).partition("@")
        part = f"-{record.path.replace('/', '-')}" if record.path else ""
        plain = options.stage / f"{name}-{version}-{held.identity[:8]}{part}"
        if LocalStore(plain).stat(MANIFEST_NAME) is None:
            export(held.path / record.path, plain, engines[0])
        with _opened(open_place(plain), replace(options, part=None)) as (held, record):
            yield held, record, replace(options, name=name, version=version)


@contextmanager
def _opened(
    place: Place, options: ServerOptions, *, compares: bool = True
) -> Iterator[tuple[OpenCheckpoint, PartRecord]]:
    """The checkpoint on this machine, leased, and the part to publish; with `compares`, digests are
    compared.
    """
    if not place.is_local or is_delta(place):
        place = open_place(
            pull(place).path if options.stage is None else _pull_to_stage(place, options.stage)
        )
    with open_checkpoint(place) as held:
        if problems := held.find_problems(deep=True) if compares else ():
            raise CorruptError(
                f"{held.path}: {listing(problems)}; not published, use another checkpoint"
            )
        yield held, _chosen_part(held, options)


def _pull_to_stage(place: Place, stage: Path) -> Path:
    """Pull the checkpoint into the stage, where it may take the place of an earlier copy, and of
    nothing else.
    """
    folder = stage / _run_of(place) / place.basename
    if LocalStore(folder).identity == place.folder.identity:
        raise ConfigError(f"{stage}: stage= is where the chain is, expected another folder")
    is_copy = is_staged(folder)
    is_free = LocalStore(folder).stat(MANIFEST_NAME) is None
    try:
        path = pull(place, folder, overwrite=is_copy).path
    except NameTakenError as error:
        raise NameTakenError(
            f"{folder}: no publish has put there what it holds, so it is not replaced; expected "
            f"another folder as stage= ({error})"
        ) from error
    if is_copy or is_free:
        mark_staged(path)
    return path


def _chosen_part(held: OpenCheckpoint, options: ServerOptions) -> PartRecord:
    kinds = {"auto": ("adapter", "model"), "adapter": ("adapter",), "weights": ("model",)}[
        options.kind
    ]
    parts = [
        part
        for part in held.manifest.parts
        if part.kind in kinds and options.part in (None, part.name)
    ]
    adapters = [part for part in parts if part.kind == "adapter"]
    chosen = adapters or parts
    if len(chosen) != 1:
        known = ", ".join(
            f"{part.name or 'the whole model'} ({part.kind})" for part in held.manifest.parts
        )
        raise LoadError(
            f"{held.path}: {len(chosen) or 'no'} parts to publish as {options.kind}; it holds "
            f"{known}; name one of them with part= and kind="
        )
    return chosen[0]


def _refuse_misread(
    servers: Sequence[Server],
    held: OpenCheckpoint,
    record: PartRecord,
    file: TensorFile,
    options: ServerOptions,
) -> dict[str, str]:
    """Raise LoadError for all that servers would misread.

    Returns why an adapter's base was not compared, by URL.
    """
    engines = sorted({server.engine.lower() for server in servers})
    store = Place(held.store, record.path).folder
    found = [line for engine in engines for line in findings(engine, store, file, _ANY_RANK)]
    uncompared = {}
    for server in servers if record.kind == "adapter" else ():
        version, why = server.weight_version(), ""
        if version in (None, _FIRST_VERSION):
            wrong, why = compare_base(
                record, _own_path(server.served().base_path, options.visible_at)
            )
            found += wrong
        else:
            why = f"the server holds the weights {version}"
        if why:
            uncompared[server.client.url] = why
    if found:
        raise LoadError(f"{held.path}: not published: {listing(list(dict.fromkeys(found)))}")
    return uncompared


@dataclass(frozen=True)
class _Folder:
    """The folder to publish."""

    here: Path
    there: str  # its path as the servers see it

    @classmethod
    def of(cls, here: Path, options: ServerOptions) -> "_Folder":
        """Replaces the longest folder of `visible_at` that contains `here` by its path on the
        servers.
        """
        here, visible_at = here.absolute(), options.visible_at
        fitting = [folder for folder in visible_at if here.is_relative_to(Path(folder).absolute())]
        if visible_at and not fitting:
            raise ConfigError(
                f"{here}: below no folder of visible_at= ({', '.join(visible_at)}); "
                "the servers do not see it"
            )
        if not fitting:
            return cls(here, str(here))
        folder = max(fitting, key=len)
        return cls(here, str(Path(visible_at[folder]) / here.relative_to(Path(folder).absolute())))

    def __str__(self) -> str:
        return (
            str(self.here)
            if str(self.here) == self.there
            else f"{self.here}, for the server {self.there}"
        )


def _own_path(path: str | None, visible_at: Mapping[str, str]) -> str:
    """The path on this machine of the servers' `path`: the same if `visible_at` does not contain
    it; "" for None.
    """
    fitting = [
        folder for folder, seen in visible_at.items() if path and Path(path).is_relative_to(seen)
    ]
    if not path or not fitting:
        return path or ""
    folder = max(fitting, key=lambda each: len(visible_at[each]))
    return str(Path(folder) / Path(path).relative_to(visible_at[folder]))


def _run_of(place: Place) -> str:
    """The name of the folder of a checkpoint, in characters that other names allow."""
    return _as_name(Place(place.absolute.beside).basename) or "run"


def _as_name(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text)


def _default_name(place: Place, held: OpenCheckpoint, record: PartRecord) -> str:
    """The name of the run, with that of the part, if it has one, where the checkpoint has several
    adapters.
    """
    several = len([part for part in held.manifest.parts if part.kind == "adapter"]) > 1
    return (
        f"{_run_of(place)}-{_as_name(record.name)}" if several and record.name else _run_of(place)
    )


def _adapter_name(held: OpenCheckpoint, options: ServerOptions) -> str:
    step = held.manifest.step
    head = held.path.name if step is None else str(step)
    # the same step may have been saved again
    version = options.version or f"{head}-{held.identity[:8]}"
    return f"{options.name}@{version}"


def _weights_version(held: OpenCheckpoint) -> str:
    return f"{_run_of(held.place)}/{held.path.name}#{held.identity[:16]}"


# All servers


def _on_each(each: Sequence[Any], step: Callable[[Any], Any]) -> list[Any]:
    """Run `step` on all servers at the same time.

    Returns for each its result, or the CheckpointError it raised.
    """

    def outcome(one: Any) -> Any:
        try:
            return step(one)
        except CheckpointError as error:
            return error

    with ThreadPoolExecutor(max(1, len(each))) as pool:
        return list(pool.map(outcome, each))


def _problems(outcomes: Sequence[Any]) -> list[str]:
    return [str(each) for each in outcomes if isinstance(each, CheckpointError)]


# Adapters


@dataclass(frozen=True)
class _Reference:
    """The expected answers of an adapter."""

    is_neutral: bool  # the adapter changes nothing: its answers equal the base's
    # log probabilities of transformers, as `probe` gives them
    base: list[list[float]] | None = None
    adapted: list[list[float]] | None = None


@dataclass(frozen=True)
class _Adapter:
    name: str
    folder: _Folder
    reference: _Reference | None  # None: answers are not compared
    has_version: bool  # its name has the version= of the caller, and not the digest of its content


@dataclass
class _AdapterServer:
    """One server during a publish of an adapter."""

    server: Server
    weights: str | None = None  # the version of the weights below the adapter
    is_new: bool = True
    checked: str = ""
    unloaded: tuple[str, ...] = ()


def _publish_adapter(
    servers: Sequence[Server], adapter: _Adapter, options: ServerOptions
) -> list[ServerReport]:
    """Load the adapter on all servers and compare the answers; if one fails, unload it where it was
    new.
    """
    targets = [_AdapterServer(server) for server in servers]
    if problems := _problems(_on_each(targets, lambda target: _prepare_adapter(target, adapter))):
        raise EngineError(f"{listing(problems)}; no adapter was loaded")
    new = [target for target in targets if target.is_new]
    problems = _problems(_on_each(new, lambda target: _load_adapter(target, adapter)))
    if not problems:
        problems = _problems(_on_each(targets, lambda target: _check_adapter(target, adapter)))
    if problems:
        raise _undone(new, adapter, problems)
    unloading = _problems(
        _on_each(targets, lambda target: _unload_older(target, adapter.name, options.keep))
    )
    problems = _problems(_on_each(targets, lambda target: _expect_weights_below(target, adapter)))
    problems += _problems(_on_each(targets, lambda target: _expect_listed(target, adapter)))
    if problems:
        raise _undone(new, adapter, problems)
    if unloading:
        LOG.warning(
            "%s: published, but older versions are still loaded: %s",
            adapter.name,
            listing(unloading),
        )
    return [
        ServerReport(
            target.server.client.url,
            f"{target.server.engine} {target.server.version}",
            None,
            target.is_new,
            target.checked,
            unloaded=target.unloaded,
        )
        for target in targets
    ]


def _undone(
    new: Sequence[_AdapterServer], adapter: _Adapter, problems: Sequence[str]
) -> EngineError:
    """Unload the adapter where it was new; the error that says so."""
    loaded = [target for target in new if target.is_new]  # others were loaded by another publisher
    left = _problems(_on_each(loaded, lambda target: target.server.unload_adapter(adapter.name)))
    still = f"; {listing(left)}: it may hold {adapter.name} now" if left else ""
    gone = sorted({name for target in new for name in target.unloaded})
    older = f"{listing(gone, ', ')}: unloaded before" if gone else "older versions answer as before"
    return EngineError(
        f"{listing(problems)}; {adapter.name} (from {adapter.folder}) was unloaded where it "
        f"was new; {older}{still}"
    )


def _prepare_adapter(target: _AdapterServer, adapter: _Adapter) -> None:
    """Find out whether it is loaded.

    Raises EngineError for a server that is paused or loading weights: it would not answer. Also for
    an adapter of a version that the caller has named: the server does not say which content it has
    read under this name.
    """
    server = target.server
    target.weights = server.weight_version()
    if (target.weights or "").endswith(_LOADING) or server.is_paused():
        raise EngineError(
            f"{server.client.url}: paused, or between two versions of its weights; if no other "
            "publish is under way, publish full weights again"
        )
    target.is_new = adapter.name not in server.served().adapters
    if adapter.has_version and not target.is_new:
        raise _already_loaded(target, adapter)


def _already_loaded(target: _AdapterServer, adapter: _Adapter) -> EngineError:
    return EngineError(
        f"{target.server.client.url}: {adapter.name}: loaded already, and whether from these files "
        "is not known; give another version=, or none: then the name has the digest of the files"
    )


def _load_adapter(target: _AdapterServer, adapter: _Adapter) -> None:
    server = target.server
    target.is_new = server.load_adapter(adapter.name, adapter.folder.there)
    if not adapter.has_version:
        return
    if not target.is_new:
        raise _already_loaded(target, adapter)
    server.drop_caches()  # another adapter of this name may have left its states in a cache


def _expect_weights_below(target: _AdapterServer, adapter: _Adapter) -> None:
    """Raise EngineError if the server's weights are no longer those that the adapter was compared
    on.
    """
    version = target.server.weight_version()
    if version != target.weights:
        raise EngineError(
            f"{target.server.client.url}: its weights were {target.weights} and are {version} now: "
            "it was restarted, or another publisher has replaced them; the answers of "
            f"{adapter.name} were compared on others"
        )


def _expect_listed(target: _AdapterServer, adapter: _Adapter) -> None:
    """Raise EngineError if the server does not list the adapter, with its path."""
    adapters, url = target.server.served().adapters, target.server.client.url
    if adapter.name not in adapters:
        raise EngineError(
            f"{url}: {adapter.name}: not in its list of models after it was loaded; was it "
            "restarted, or does another publisher unload adapters there?"
        )
    path = adapters[adapter.name]
    if path is not None and path != adapter.folder.there:
        raise EngineError(
            f"{url}: {adapter.name}: loaded from {path}, expected {adapter.folder}; "
            "give another version="
        )


def _check_adapter(target: _AdapterServer, adapter: _Adapter) -> None:
    """Raise EngineError if the server does not list the adapter, or does not apply it."""
    _expect_listed(target, adapter)
    target.checked = _compare_answers(target.server, adapter)


def _compare_answers(server: Server, adapter: _Adapter) -> str:
    """The result of the comparison. Raises EngineError for answers that are not the adapter's."""
    if adapter.reference is None:
        return "listed"
    if adapter.reference.is_neutral:
        return "listed; the adapter changes nothing, so its answers prove nothing"
    model, url = server.served().base, server.client.url
    base, adapted = probe(server, model), probe(server, server.model_name(model, adapter.name))
    moved = _distance(base, adapted)
    if moved < _ALIKE:
        raise EngineError(
            f"{url}: {adapter.name}: answers as the base does; the server does not apply it (names "
            "of its layers?), or it is too close to the base for three prompts: then check='listed'"
        )
    if adapter.reference.base is None or adapter.reference.adapted is None:
        return f"listed; answers differ from the base's by up to {moved:.3f}"
    error, other = (
        _distance(adapter.reference.adapted, adapted),
        _distance(adapter.reference.base, adapted),
    )
    # processors that multiply in bfloat16 err by more than others
    rounding = _distance(adapter.reference.base, base)
    limit = max(_NEAR, 2 * min(rounding, _NEAR))
    if error > limit or (
        error > other and _distance(adapter.reference.base, adapter.reference.adapted) > 2 * _NEAR
    ):
        raise EngineError(
            f"{url}: {adapter.name}: its log probabilities are {error:.3f} from those of "
            f"transformers and PEFT, expected at most {limit:.3g}; the server applies it otherwise "
            "(scaling, order of layers?)"
        )
    return f"listed; answers are those of transformers and PEFT within {error:.3f}"


def _unload_older(target: _AdapterServer, name: str, keep: int) -> None:
    """Unload all but the `keep` newest of the older versions under the same name."""
    head, _, _ = name.partition("@")
    versions = [
        other for other in target.server.served().adapters if other.partition("@")[0] == head
    ]
    older = sorted(
        (other for other in versions if _natural_order(other) < _natural_order(name)),
        key=_natural_order,
    )
    for other in older[: max(0, len(older) - keep)]:
        target.server.unload_adapter(other)
        target.unloaded = (*target.unloaded, other)


def _natural_order(text: str) -> list[Any]:
    return [
        (0, int(each), "") if each.isdecimal() else (1, 0, each)
        for each in re.split(r"(\d+)", text)
        if each
    ]


def _distance(one: list[list[float]], other: list[list[float]]) -> float:
    """The largest difference of log probabilities, over as many as both have."""
    pairs = (
        pair
        for first, second in zip(one, other, strict=True)
        for pair in zip(first, second, strict=False)
    )
    return max((abs(a - b) for a, b in pairs), default=0.0)


def _reference(
    held: OpenCheckpoint, record: PartRecord, file: TensorFile, options: ServerOptions
) -> _Reference | None:
    if options.check == "listed":
        return None
    outer = [name for name in file.specs if name.endswith("lora_B.weight")]
    is_neutral = bool(outer) and not any(bool(file.read(name).any()) for name in outer)
    if options.base is None or is_neutral:
        return _Reference(is_neutral)
    from ft_ckpt.extensions.rl.reference import reference_answers  # loads the models

    return _Reference(False, *reference_answers(held.path, record.name, options.base))


# Full weights


@dataclass(frozen=True)
class _Weights:
    """Full weights to load, from open files."""

    version: str
    folder: _Folder
    checkpoint: Path
    file: TensorFile
    config: Mapping[str, Any]
    options: ServerOptions
    part: str = ""  # its name in the checkpoint

    @cached_property
    def answers(self) -> list[list[float]]:
        """The answers of transformers to the prompts; loads the model."""
        from ft_ckpt.extensions.rl.reference import model_answers

        return model_answers(self.checkpoint, self.part)


@dataclass
class _Update:
    """One server during a publish of weights."""

    server: Server
    before: str | None = None
    base: str = ""  # the served model name
    base_path: str | None = None  # the path of its initial weights
    is_new: bool = True
    has_begun: bool = False  # its reported version may differ from `before`
    has_loaded: bool = False  # its weights may, too
    # it was restarted meanwhile, or holds the weights of another publisher
    is_overtaken: bool = False
    paused_at: float | None = None
    paused_seconds: float = 0.0
    digests: Mapping[str, str] | None = None
    # linear layers that files cannot be compared with
    packed: Mapping[str, PackedLayer] = field(default_factory=dict)
    # to the prompts, before the update, of a server with packed layers
    answers: list[list[float]] | None = None
    has_changed: bool = False  # packed layers are others in the files than before the update
    is_partly_compared: bool = False  # it has packed layers
    checked: str = _UNCHECKED
    notes: list[str] = field(default_factory=list)  # what was not compared


def _publish_weights(
    servers: Sequence[Server], weights: _Weights
) -> tuple[str, list[ServerReport]]:
    """Pause all servers, load and compare, set the version, resume, look again; after a failure
    restore all.

    Returns the name of the served model, and a report of each server.
    """
    updates = [_Update(server) for server in servers]
    if problems := _problems(_on_each(updates, lambda update: _prepare(update, weights))):
        raise EngineError(
            f"{listing(problems)}; nothing was loaded, all servers hold what they held before"
        )
    new = [update for update in updates if update.is_new]
    restored: list[str] = []
    try:
        problems = _problems(
            _on_each(new, lambda update: _load_weights(update, weights))
        ) or _unlike(updates)
        if not problems:
            problems = _problems(_on_each(new, lambda update: _set_version(update, weights)))
        if problems:
            restored = _put_all_back(new, weights)
    except BaseException:  # such as KeyboardInterrupt
        LOG.warning(
            "%s: publish interrupted: %s", weights.version, listing(_put_all_back(new, weights))
        )
        raise
    finally:
        paused = _problems(_on_each(new, _resume))
    if not problems and (problems := _last_look(updates, weights)):
        try:
            restored = _put_all_back(new, weights)
        finally:
            paused = _problems(_on_each(new, _resume))
    if problems:
        raise EngineError(
            "; ".join(
                [*problems, *(restored or ["all servers hold what they held before"]), *paused]
            )
        )
    if paused:
        raise EngineError(f"{listing(paused)}; all servers hold {weights.version}")
    return updates[0].base, [
        ServerReport(
            update.server.client.url,
            f"{update.server.engine} {update.server.version}",
            update.before,
            update.is_new,
            "; ".join([update.checked, *update.notes]),
            update.paused_seconds,
        )
        for update in updates
    ]


def _prepare(update: _Update, weights: _Weights) -> None:
    """Query the current weights of the server.

    Raises EngineError if the served model has another config.
    """
    server = update.server
    served = server.served()
    update.before, update.base, update.base_path = (
        server.weight_version(),
        served.base,
        served.base_path,
    )
    _refuse_other_config(update, weights)
    if update.before == weights.version:
        update.paused_at = time.monotonic()  # a killed publisher may have left it paused
        _resume(update)
        update.paused_seconds = 0.0
        is_other = _difference(update, weights) is not None
        is_compared = update.checked != _UNCHECKED and not update.is_partly_compared
        update.is_new = is_other or not (is_compared or weights.options.version is None)
    if update.is_new:
        _learn_layout(update, weights)


def _refuse_other_config(update: _Update, weights: _Weights) -> None:
    """Compare the config with the one that the server was started with: it builds its model from
    that one alone.
    """
    url, base = update.server.client.url, _base_here(update, weights)
    if base is None:
        path = update.base_path or "the path of the served model"
        update.notes.append(
            f"its config was not compared: {path} is not a folder here; see visible_at="
        )
        return
    changing, tokens = compare_configs(_config_in(LocalStore(base)), weights.config)
    if changing:
        raise EngineError(
            f"{url}: config.json: {listing(changing, '; ', 3)} ({base}; new weights: "
            f"{weights.folder}); a server keeps the config of its start; start a "
            "server with this model"
        )
    update.notes += [f"it keeps its own token ids: {text}" for text in tokens[:1]]


def _learn_layout(update: _Update, weights: _Weights) -> None:
    """Find the layers that the server keeps in another layout than files, from the weights that it
    holds now.
    """
    server = update.server
    if weights.options.check == "listed" or not is_known(weights.config):
        return
    reported = server.digests()
    if not reported:
        return
    with suppress(CheckpointError, OSError), _weights_before(update, weights) as old:
        if isinstance(old, _Weights):
            update.packed = packed_layers(reported, old.file, old.config)
    is_packed = bool(update.packed) or any(map(is_unreported, reported.values()))
    if is_packed and not server.is_paused():
        update.answers = probe(server, update.base)


def _load_weights(update: _Update, weights: _Weights) -> None:
    server = update.server
    _expect_version(update, update.before)  # else another publisher may have paused it
    update.paused_at = time.monotonic()
    server.pause(weights.options.in_flight)
    update.has_begun = True
    server.set_weight_version(weights.version + _LOADING)
    update.has_loaded = True
    server.load_weights(weights.folder.there)
    if wrong := _difference(update, weights):
        raise EngineError(wrong)


def _set_version(update: _Update, weights: _Weights) -> None:
    _expect_version(update, weights.version + _LOADING)
    update.server.set_weight_version(weights.version)


def _expect_version(update: _Update, expected: str | None) -> None:
    """Raise EngineError if the server reports another version; some servers report none."""
    reported = update.server.weight_version()
    if reported == expected or (reported is None and update.before is None):
        return
    # None, where it has reported one: it did not answer this once
    update.is_overtaken = reported is not None
    raise EngineError(
        f"{update.server.client.url}: reports the version {reported}, expected {expected}: it was "
        "restarted, or another publisher has replaced its weights"
    )


def _difference(update: _Update, weights: _Weights) -> str | None:
    """How the digests of the server differ from those of the files; None if they do not, or are not
    compared.
    """
    server = update.server
    update.checked = _UNCHECKED
    if weights.options.check == "listed":
        return None
    update.digests = server.digests()
    # some versions do not compute them while paused
    if update.digests == {} and update.paused_at is not None:
        server.resume()
        update.digests = server.digests()
        server.pause(weights.options.in_flight)
    if not update.digests:
        return None
    comparison = compare_digests(update.digests, weights.file, weights.config)
    different = []
    update.has_changed = False
    update.is_partly_compared = bool(comparison.different)
    for name, in_files in comparison.different.items():
        reported, layer = update.digests[name], update.packed.get(name)
        if not is_unreported(reported) and (layer is None or not layer.fits(reported, in_files)):
            different.append(name)
        if layer is not None and layer.has_changed(in_files):
            update.has_changed = True
    if different and is_known(weights.config):
        return (
            f"{server.client.url}: {different[0]}: its SHA-256 is not that of the files in "
            f"{weights.folder}, as of {len(different)} of {comparison.total} parameters; does the "
            "server see another copy of that folder?"
        )
    if comparison.equal:
        update.checked = _in_words(comparison, update)
    return None


def _in_words(comparison: Comparison, update: _Update) -> str:
    """The result of a comparison without a difference, with the layers that were not compared with
    the files.
    """
    digests = update.digests or {}
    missing = [name for name in comparison.different if is_unreported(digests[name])]
    packed = [
        name for name in comparison.different if name in update.packed and name not in missing
    ]
    changed = [name for name in packed if digests[name] != update.packed[name].reported]
    lines = [comparison.counts]
    if missing:
        lines.append(f"{len(missing)} are kept in another layout, without digests")
    if packed and len(changed) == len(packed):
        lines.append(f"{len(packed)} are kept in another layout, changed with the update")
    elif packed:
        lines.append(
            f"{len(packed)} are kept in another layout, {len(changed)} of them changed with the "
            "update, as in the files"
        )
    return "; ".join(lines) + comparison.dropped


def _last_look(updates: Sequence[_Update], weights: _Weights) -> list[str]:
    """A line for each server that no longer holds the weights; versions are read last, as a restart
    resets them.
    """
    problems = _problems(_on_each(updates, lambda update: _expect_weights(update, weights)))
    return problems or _problems(
        _on_each(updates, lambda update: _expect_last_version(update, weights))
    )


def _expect_weights(update: _Update, weights: _Weights) -> None:
    """Raise EngineError if the digests, the served model or the answers are not those of the
    update.
    """
    server, url = update.server, update.server.client.url
    if update.digests:
        digests = server.digests() or {}
        changed = [name for name, digest in update.digests.items() if digests.get(name) != digest]
        if changed:
            update.is_overtaken = bool(digests)
            raise EngineError(
                f"{url}: {changed[0]}: its SHA-256 has changed since it was compared, as of "
                f"{len(changed)} of {len(update.digests)} parameters: it was restarted, or another "
                "publisher has replaced its weights"
            )
    served = server.served()
    if (served.base, served.base_path) != (update.base, update.base_path):
        update.is_overtaken = True
        raise EngineError(
            f"{url}: serves {served.base} from {served.base_path}, expected {update.base} from "
            f"{update.base_path}: it was restarted with another model"
        )
    if update.is_partly_compared:
        _expect_answers(update, weights)


def _expect_answers(update: _Update, weights: _Weights) -> None:
    """Compare the answers of a server whose layers cannot all be compared.

    Raises EngineError for wrong ones.
    """
    url, answers = update.server.client.url, probe(update.server, update.base)
    notes = []
    if update.answers is not None:
        moved = _distance(update.answers, answers)
        if update.has_changed and moved < _ALIKE:
            raise EngineError(
                f"{url}: answers as before the update, although its layers have changed; it does "
                "not apply them, or they are too close to the weights before for three prompts: "
                "then check='listed'"
            )
        notes.append(f"answers differ from those before by up to {moved:.3f}")
    # the head is a packed copy, and the digest that of the embedding
    if weights.config.get("tie_word_embeddings"):
        error = _distance(weights.answers, answers)
        if error > 2 * _NEAR:
            raise EngineError(
                f"{url}: its log probabilities are {error:.3f} from those of transformers, "
                f"expected at most {2 * _NEAR}; it keeps a packed copy of the tied head, which it "
                "may not have replaced; start a server with this model"
            )
        notes.append(f"they are those of transformers within {error:.3f}")
    update.notes[:0] = notes


def _expect_last_version(update: _Update, weights: _Weights) -> None:
    _expect_version(update, weights.version)
    if (
        update.checked == _UNCHECKED
        and update.before is None
        and update.server.weight_version() is None
    ):
        update.checked = _UNREPORTED


def _unlike(updates: Sequence[_Update]) -> list[str]:
    """A line for each server whose parameters differ from those of the first one with the same
    engine and names.
    """
    found = []
    for update in updates:
        first = next(
            each
            for each in updates
            if each.server.engine == update.server.engine
            and (each.digests or {}).keys() == (update.digests or {}).keys()
        )
        names = [
            name
            for name, digest in (update.digests or {}).items()
            if digest != (first.digests or {})[name]
        ]
        if names:
            url, other = update.server.client.url, first.server.client.url
            found.append(
                f"{url}: {names[0]}: one of {len(names)} parameters that differ "
                f"from those on {other}"
            )
    return found


def _put_all_back(updates: Sequence[_Update], weights: _Weights) -> list[str]:
    """Restore the previous weights on each server whose update has begun, unless another publisher
    was there.

    Returns a line for each on the weights that it now has.
    """
    touched = [update for update in updates if update.has_begun or update.is_overtaken]
    return _on_each(touched, lambda update: _put_back(update, weights))


def _put_back(update: _Update, weights: _Weights) -> str:
    """Restore the previous weights, unless another publisher has replaced them; a line on what the
    server now has.
    """
    server, url, before = update.server, update.server.client.url, update.before
    loading = weights.version + _LOADING
    try:
        reported = server.weight_version()
        is_ours = reported in (weights.version, loading) or (reported is None and before is None)
        if not update.has_loaded:
            return _put_version_back(update, reported, is_ours=is_ours)
        if is_ours and update.is_overtaken:
            server.set_weight_version(loading)
            return f"{url} holds other weights, so its version was set to {loading}: publish again"
        # else it was restarted, perhaps before the load
        if not is_ours and reported not in (before, _FIRST_VERSION):
            if update.digests and server.digests() != update.digests:
                return f"{url} reports {reported} now, and was left as it is"
            server.set_weight_version(loading)
            return (
                f"{url} reported {reported}, but may hold {weights.version}: set to {loading}, "
                "publish again"
            )
        _restore(update, weights)
    except (CheckpointError, OSError) as error:
        return (
            f"{url} may hold a part of {weights.version}, and {before} was not loaded again "
            f"({error})"
        )
    return f"{url} holds {before} again"


def _put_version_back(update: _Update, reported: str | None, *, is_ours: bool) -> str:
    """Restore the version of a server whose weights were not touched."""
    url = update.server.client.url
    if not is_ours and reported != update.before:
        return f"{url} reports {reported} now, and was left as it is"
    if reported != update.before:
        update.server.set_weight_version(str(update.before))
    return f"{url} holds {update.before} again"


def _restore(update: _Update, weights: _Weights) -> None:
    """Load the previous weights.

    Raises EngineError if they are unknown, or the server does not hold them then.
    """
    server = update.server
    with _weights_before(update, weights) as old:
        if old is None:
            raise EngineError(f"where its version {update.before} came from is not known")
        if update.paused_at is None:
            update.paused_at = time.monotonic()
            server.pause(weights.options.in_flight)
        server.set_weight_version(weights.version + _LOADING)
        server.load_weights(old if isinstance(old, str) else old.folder.there)
        if not isinstance(old, str) and (wrong := _difference(update, old)):
            raise EngineError(wrong)
        server.set_weight_version(str(update.before))


@contextmanager
def _weights_before(
    update: _Update, weights: _Weights, *, compares: bool = True
) -> Iterator["_Weights | str | None"]:
    """The previous weights: a checkpoint beside this one, or the server's initial weights.

    A path if only the servers see them; None if they are unknown. With `compares`, the digests of
    the checkpoint are compared.
    """
    options = weights.options
    if update.before == _FIRST_VERSION:
        base = _base_here(update, weights)
        if base is None:
            yield update.base_path
            return
        with closing(open_folder(open_place(base))) as file:
            folder = _Folder(base, str(update.base_path))
            yield _Weights(
                _FIRST_VERSION, folder, base, file, _config_in(LocalStore(base)), options
            )
        return
    version = _VERSION.fullmatch(update.before or "")
    if version is None:
        yield None
        return
    run, name, identity = version.groups()
    beside = weights.checkpoint.absolute().parent
    for path in _places_of(run, name, beside):
        if LocalStore(path).stat(MANIFEST_NAME) is None:
            continue
        with _opened(open_place(path), options, compares=compares) as (held, record):
            if not held.identity.startswith(identity):
                continue  # from another run, or saved again since
            folder, place = (
                _Folder.of(held.path / record.path, options),
                Place(held.store, record.path),
            )
            with closing(open_folder(place)) as file:
                yield _Weights(
                    str(update.before), folder, held.path, file, _config_in(place.folder), options
                )
            return
    raise EngineError(
        f"it is neither in {beside} nor in a run {run!r} near it, or was saved again since"
    )


def _places_of(run: str, name: str, beside: Path) -> Iterator[Path]:
    """The folders in which a checkpoint of a run may be: beside the new one, or in a run of this
    name near it.

    `run` is the name of the run's folder in characters that names allow, see `_as_name`.
    """
    yield beside / name
    for folder in (beside, *beside.parents[:2]):
        yield folder / run / name
        runs = [entry.name for entry in LocalStore(folder).list_folder().folders]
        yield from (
            folder / other / name
            for other in sorted(runs)
            if other != run and _as_name(other) == run
        )


def _base_here(update: _Update, weights: _Weights) -> Path | None:
    """The folder that the server was started with, if this machine sees it."""
    base = Path(_own_path(update.base_path, weights.options.visible_at))
    return base if base.is_absolute() and LocalStore(base).stat("config.json") is not None else None


def _config_in(store: Store) -> dict[str, Any]:
    with damaged_input(store.where("config.json")):
        return dict(json.loads(read_text(store, "config.json")))


def _resume(update: _Update) -> None:
    """Resume generation, with retries, because a server must not stay paused."""
    if update.paused_at is None:
        return
    for tries_left in range(_RESUME_TRIES - 1, -1, -1):
        try:
            update.server.resume()
            break
        except EngineError as error:
            if not tries_left:
                raise EngineError(
                    f"{error}; {update.server.client.url} may be PAUSED: resume it by hand"
                ) from None
            time.sleep(_RESUME_PAUSE_SECONDS)
    update.paused_seconds, update.paused_at = time.monotonic() - update.paused_at, None
