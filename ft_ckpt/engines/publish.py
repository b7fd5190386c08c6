"""Publish a committed checkpoint into running inference servers, and prove that they hold it.

Each version of an adapter gets its own name and is never loaded again under it, because the caches of servers are keyed
by name. Full weights are loaded in place while generation is paused. Meanwhile the version that a server reports ends
in "(loading)", so that no server reports weights that it does not hold if the publisher is killed.
"""

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ft_ckpt.checkpoint.catalog import is_delta
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME, PartRecord
from ft_ckpt.checkpoint.open_checkpoint import OpenCheckpoint, open_checkpoint
from ft_ckpt.engines.client import Client
from ft_ckpt.engines.expected import compare_digests, is_known
from ft_ckpt.engines.export import export
from ft_ckpt.engines.preflight import compare_base, findings, needs_export
from ft_ckpt.engines.servers import Server, connect, probe
from ft_ckpt.errors import CheckpointError, ConfigError, CorruptError, EngineError, LoadError, damaged_input, listing
from ft_ckpt.formats.layout import TensorFile
from ft_ckpt.messages import LOG
from ft_ckpt.model.folder import open_folder
from ft_ckpt.storage.local_store import LocalStore
from ft_ckpt.storage.place import Place, location_name, open_place
from ft_ckpt.storage.store import Store, read_text
from ft_ckpt.transfer.deltas import append_checkpoint, drop_rebuilt
from ft_ckpt.transfer.push import pull

_RESUME_TRIES, _RESUME_PAUSE_SECONDS = 4, 1.0
_LOADING = " (loading)"  # after the version of a server whose weights are being replaced
_UNCHECKED = "the version only"
_SHAPE_FIELDS = (  # of config.json; a server keeps those that it was started with
    *("architectures", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size"),
)
_ANY_RANK = 1 << 20  # no limit here: the server checks its own
_FIRST_VERSION = "default"  # the version that vLLM and SGLang report for their initial weights
_ALIKE = 1e-4  # log probabilities that differ by less count as equal
_NEAR = 0.1  # largest error of log probabilities in bfloat16, against a reference in float32


@dataclass(frozen=True)
class ServerReport:
    """One server after a publish; for a chain its new entry, with the kind as `engine` and the base as `before`."""

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
    """The model name for requests: the adapter's name with its version (on SGLang "BASE:NAME"), or the name of the
    base; of a chain its name."""
    version: str
    """The version: of an adapter the part after "@"; of weights the one that servers report; in a chain the entry."""
    servers: tuple[ServerReport, ...]
    """The servers, in the order of their URLs."""
    seconds: float
    """From the call to the last answer."""


@dataclass(frozen=True, kw_only=True)
class PublishOptions:
    """The arguments of `publish` beside checkpoint and URLs."""

    name: str | None = None
    version: str | None = None
    kind: str = "auto"
    part: str | None = None
    visible_at: Mapping[str, str] = field(default_factory=dict)
    stage: Path | None = None
    keep: int = 2
    in_flight: str = "wait"
    check: str = "all"
    base: Any = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout_seconds: float = 300.0
    delta: bool = False
    anchor_every: int = 10

    def __post_init__(self) -> None:
        choices = {
            "kind": ("auto", "adapter", "weights"),
            "in_flight": ("wait", "keep", "abort"),
            "check": ("all", "listed"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}={getattr(self, name)!r}: expected one of {', '.join(allowed)}")
        if not isinstance(self.anchor_every, int) or self.anchor_every < 1:
            raise ConfigError(f"anchor_every={self.anchor_every!r}: expected a number of entries, at least 1")
        if not isinstance(self.keep, int) or self.keep < 0:
            raise ConfigError(f"keep={self.keep!r}: expected a number of older versions, at least 0")
        for name in ("name", "version"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and re.fullmatch(r"[\w.-]+", value)):
                raise ConfigError(f"{name}={value!r}: expected letters, digits, dots, dashes and underscores")
        plain = {each.name: each.default for each in fields(self) if each.default is not MISSING}
        given = {name for name, default in plain.items() if getattr(self, name) != default}
        if wrong := sorted(
            given & (plain.keys() - {"delta", "anchor_every"}) if self.delta else given & {"anchor_every"}
        ):
            kind = "of servers; a chain (delta=True) has no such" if self.delta else "of chains; give delta=True"
            raise ConfigError(f"{listing(wrong, ', ')}: {kind}")

    def check_urls(self, urls: Sequence[str]) -> None:
        """Raise ConfigError for invalid or repeated URLs, a chain without `delta`, a server or two chains with it."""
        if not urls or len({url.rstrip("/") for url in urls}) < len(urls):
            raise ConfigError(f"{', '.join(urls) or 'no URL'}: expected one or more servers, each once")
        for url in urls:
            is_server = url.partition("://")[0].lower() in ("http", "https")
            if self.delta and is_server:
                raise ConfigError(
                    f"{url}: delta=True appends to a chain, expected a folder or a bucket; a server gets an entry of "
                    "the chain by another publish, with stage="
                )
            if not self.delta:
                Client(url, self.headers, self.timeout_seconds)
        if self.delta and len(urls) > 1:
            raise ConfigError(f"{', '.join(urls)}: expected one chain")


def publish(
    checkpoint: str | Path | Place,
    url: str | Sequence[str],
    *,
    name: str | None = None,
    version: str | None = None,
    kind: str = "auto",
    part: str | None = None,
    visible_at: Mapping[str, str] | None = None,
    stage: str | Path | None = None,
    keep: int = 2,
    in_flight: str = "wait",
    check: str = "all",
    base: Any = None,
    headers: Mapping[str, str] | None = None,
    timeout_seconds: float = 300.0,
    delta: bool = False,
    anchor_every: int = 10,
) -> PublishReport:
    """Load the committed `checkpoint` into the running server at `url`, or into several, and prove that they hold it.

    Supports vLLM, SGLang, and servers with SGLang's endpoints. On return, all servers hold the checkpoint; after a
    failure each is restored to its previous state, and the error says what it holds now. The digests of all files are
    compared first, and the checkpoint is leased until the servers have answered.

    An adapter is loaded as `name`@`version`, by default the run's folder (with the part, if the checkpoint has several
    adapters), the step and the head of the manifest's digest, as in "policy@500-3fa9c1d2", and never loaded again under
    a name. It is refused beforehand if the engine
    would drop or misread part of it. Then the server must list it, and its answers to three prompts must differ from
    the base's; with `base` (the base model, as in `load_model`) they must also match those of transformers and PEFT.
    Of older versions under `name`, the `keep` newest stay loaded.

    Full weights are loaded in place: the server is paused (requests `in_flight`: "wait" for their end, "keep" them, or
    "abort"), reads the files, drops its caches, reports the SHA-256 of its parameters, which are compared with those of
    the files, and resumes. `check`="listed" skips the comparison of digests and answers.

    `kind`: "adapter", "weights", or "auto" by the parts of the checkpoint; `part`: one of several parts. `visible_at`:
    the path at which the servers see a folder of this machine, as in {"/mnt/runs": "/data/runs"}. `stage`: a folder
    that servers see, for checkpoints pulled from a bucket (by default the cache), and for exports of adapters that the
    engine would misread (see `export`; by default such adapters are refused). `headers` are sent with each request;
    unless they include Authorization, the environment variable FT_CKPT_ENGINE_TOKEN is sent as bearer token.

    With `delta`, `url` is a chain (a folder, or the URL of one in a bucket), to which the checkpoint is appended: only
    the elements that differ from the newest entry, or the whole checkpoint, every `anchor_every` entries and if the
    difference has more than half of its bytes. When an entry is published to a server, its checkpoint is rebuilt in
    `stage`, byte for byte; the two newest are kept. The report has one "server", the entry.

    Raises ConfigError for invalid arguments and unsupported servers, NotACheckpointError or CorruptError for the
    checkpoint, LoadError naming everything that the engine would misread, EngineError if a server refuses, does not
    answer or holds something else.
    """
    options = PublishOptions(
        name=name, version=version, kind=kind, part=part, visible_at=visible_at or {}, keep=keep, in_flight=in_flight,
        stage=None if stage is None else Path(stage), check=check, base=base, headers=headers or {},
        timeout_seconds=timeout_seconds, delta=delta, anchor_every=anchor_every,
    )  # fmt: skip
    return publish_with(checkpoint, [url] if isinstance(url, str) else list(url), options)


def publish_with(checkpoint: str | Path | Place, urls: Sequence[str], options: PublishOptions) -> PublishReport:
    """As `publish`, with its options in one object."""
    begun = time.monotonic()
    options.check_urls(urls)
    if options.delta:
        return _append(open_place(checkpoint), open_place(urls[0]), options)
    servers = [connect(Client(url, options.headers, options.timeout_seconds)) for url in urls]
    with _exported(open_place(checkpoint), servers, options) as (held, record, options):
        folder = _Folder.of(held.path / record.path, options)
        with closing(open_folder(Place(held.store, record.path), Place(held.origin, record.path))) as file:
            uncompared = _refuse_misread(servers, held, record, file, options)
            if record.kind == "adapter":
                adapter = _Adapter(_adapter_name(held, options), folder, _reference(held, record, file, options))
                reports = [
                    replace(report, checked=f"{report.checked}; its base was not compared: {uncompared[report.url]}")
                    if report.url in uncompared
                    else report
                    for report in _publish_adapter(servers, adapter, options)
                ]
                kind, served, version = "adapter", adapter.name, adapter.name.partition("@")[2]
            else:
                version = options.version or _weights_version(held)
                config = _config_in(Place(held.store, record.path).folder)
                served, reports = _publish_weights(servers, _Weights(version, folder, held.path, file, config, options))
                kind = "weights"
    if options.stage is not None:
        _drop_rebuilt(open_place(checkpoint), options.stage)
    return PublishReport(
        open_place(checkpoint).location, kind, served, version, tuple(reports), time.monotonic() - begun
    )


def _append(checkpoint: Place, chain: Place, options: PublishOptions) -> PublishReport:
    found = append_checkpoint(checkpoint, chain, options.anchor_every)
    share = f"{found.bytes:,} of {found.full_bytes:,} bytes, {found.bytes / max(1, found.full_bytes):.1%}"
    entry = ServerReport(str(found.path), found.kind, found.base, found.is_new, share)
    return PublishReport(
        checkpoint.location, found.kind, _run_of(Place(open_place(found.path).folder)), location_name(found.path),
        (entry,), found.seconds,
    )  # fmt: skip


def _drop_rebuilt(entry: Place, stage: Path) -> None:
    """Delete checkpoints in the stage that were rebuilt from older entries of the chain; log a failure as a warning."""
    try:
        drop_rebuilt(Place(entry.absolute.beside), stage / _run_of(entry))
    except (CheckpointError, OSError) as error:
        LOG.warning("%s: rebuilt checkpoints were not deleted: %s", stage, error)


# The checkpoint


@contextmanager
def _exported(
    place: Place, servers: Sequence[Server], options: PublishOptions
) -> Iterator[tuple[OpenCheckpoint, PartRecord, PublishOptions]]:
    """As `_opened`; with `stage`, an adapter with patterns is replaced by its export in that folder."""
    with _opened(place, options) as (held, record):
        if options.name is None:
            options = replace(options, name=_default_name(place, held, record))
        if options.stage is None or record.kind != "adapter" or not needs_export(Place(held.store, record.path).folder):
            yield held, record, options
            return
        name, _, version = _adapter_name(held, options).partition("@")
        part = f"-{record.path.replace('/', '-')}" if record.path else ""
        plain = options.stage / f"{name}-{version}-{held.identity[:8]}{part}"
        if LocalStore(plain).stat(MANIFEST_NAME) is None:
            export(held.path / record.path, plain, servers[0].engine.lower())
        with _opened(open_place(plain), replace(options, part=None)) as (held, record):
            yield held, record, replace(options, name=name, version=version)


@contextmanager
def _opened(place: Place, options: PublishOptions) -> Iterator[tuple[OpenCheckpoint, PartRecord]]:
    """The checkpoint on this machine, leased and compared with its digests, and the part to publish."""
    if not isinstance(place.store, LocalStore) or is_delta(place):
        folder = None if options.stage is None else options.stage / _run_of(place) / place.basename
        if folder is not None and LocalStore(folder).identity == place.folder.identity:
            raise ConfigError(f"{options.stage}: stage= is where the chain is, expected another folder")
        place = open_place(pull(place, folder, overwrite=folder is not None).path)
    with open_checkpoint(place, compares=False) as held:
        if problems := held.find_problems(deep=True):
            raise CorruptError(f"{held.path}: {listing(list(problems))}; not published, use another checkpoint")
        held.free_memory()
        yield held, _chosen_part(held, options)


def _chosen_part(held: OpenCheckpoint, options: PublishOptions) -> PartRecord:
    kinds = {"auto": ("adapter", "model"), "adapter": ("adapter",), "weights": ("model",)}[options.kind]
    parts = [part for part in held.manifest.parts if part.kind in kinds and options.part in (None, part.name)]
    adapters = [part for part in parts if part.kind == "adapter"]
    chosen = adapters or parts
    if len(chosen) != 1:
        known = ", ".join(f"{part.name or 'the whole model'} ({part.kind})" for part in held.manifest.parts)
        raise LoadError(
            f"{held.path}: {len(chosen) or 'no'} parts to publish as {options.kind}; it holds {known}; "
            "name one of them with part= and kind="
        )
    return chosen[0]


def _refuse_misread(
    servers: Sequence[Server], held: OpenCheckpoint, record: PartRecord, file: TensorFile, options: PublishOptions
) -> dict[str, str]:
    """Raise LoadError for all that servers would misread. Returns why an adapter's base was not compared, by URL."""
    engines = sorted({server.engine.lower() for server in servers})
    store = Place(held.store, record.path).folder
    found = [line for engine in engines for line in findings(engine, store, file, _ANY_RANK)]
    uncompared = {}
    for server in servers if record.kind == "adapter" else ():
        version, why = server.weight_version(), ""
        if version in (None, _FIRST_VERSION):
            wrong, why = compare_base(record, _own_path(server.served().base_path, options.visible_at))
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
    def of(cls, here: Path, options: PublishOptions) -> "_Folder":
        """Replaces the longest folder of `visible_at` that contains `here` by its path on the servers."""
        here, visible_at = here.absolute(), options.visible_at
        fitting = [folder for folder in visible_at if here.is_relative_to(Path(folder).absolute())]
        if visible_at and not fitting:
            raise ConfigError(
                f"{here}: below no folder of visible_at= ({', '.join(visible_at)}); the servers do not see it"
            )
        if not fitting:
            return cls(here, str(here))
        folder = max(fitting, key=len)
        return cls(here, str(Path(visible_at[folder]) / here.relative_to(Path(folder).absolute())))

    def __str__(self) -> str:
        return str(self.here) if str(self.here) == self.there else f"{self.here}, for the server {self.there}"


def _own_path(path: str | None, visible_at: Mapping[str, str]) -> str:
    """The path on this machine of the servers' `path`: the same if `visible_at` does not contain it; "" for None."""
    fitting = [folder for folder, seen in visible_at.items() if path and Path(path).is_relative_to(seen)]
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
    """The name of the run, with that of the part, if it has one, where the checkpoint has several adapters."""
    several = len([part for part in held.manifest.parts if part.kind == "adapter"]) > 1
    return f"{_run_of(place)}-{_as_name(record.name)}" if several and record.name else _run_of(place)


def _adapter_name(held: OpenCheckpoint, options: PublishOptions) -> str:
    step = held.manifest.step
    head = held.path.name if step is None else str(step)
    version = options.version or f"{head}-{held.identity[:8]}"  # the same step may have been saved again
    return f"{options.name}@{version}"


def _weights_version(held: OpenCheckpoint) -> str:
    return f"{_run_of(Place(held.origin))}/{held.path.name}#{held.identity[:16]}"


# All servers


def _on_each(each: Sequence[Any], step: Callable[[Any], Any]) -> list[Any]:
    """Run `step` on all servers at the same time. Returns for each its result, or the CheckpointError it raised."""

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
    base: list[list[float]] | None = None  # log probabilities of transformers, as `probe` gives them
    adapted: list[list[float]] | None = None


@dataclass(frozen=True)
class _Adapter:
    name: str
    folder: _Folder
    reference: _Reference | None  # None: answers are not compared


def _publish_adapter(servers: Sequence[Server], adapter: _Adapter, options: PublishOptions) -> list[ServerReport]:
    """Load the adapter on all servers and compare the answers; if one fails, unload it where it was new."""
    was_there = _on_each(servers, lambda server: _has_adapter(server, adapter.name))
    if problems := _problems(was_there):
        raise EngineError(f"{listing(problems)}; no adapter was loaded")
    new = [server for server, there in zip(servers, was_there, strict=True) if not there]
    outcomes = _on_each(new, lambda server: _load_adapter(server, adapter, options))
    checks: list[Any] = []
    if not _problems(outcomes):
        checks = _on_each(servers, lambda server: _check_adapter(server, adapter))
    if problems := _problems([*outcomes, *checks]):
        left = _problems(_on_each(new, lambda server: server.unload_adapter(adapter.name)))
        still = f"; {listing(left)}: it may hold {adapter.name} now" if left else ""
        raise EngineError(
            f"{listing(problems)}; {adapter.name} (from {adapter.folder}) was unloaded where it was new; older "
            f"versions answer as before{still}"
        )
    unloaded = _on_each(servers, lambda server: _unload_older(server, adapter.name, options.keep))
    if problems := _problems(unloaded):
        LOG.warning("%s: published, but older versions are still loaded: %s", adapter.name, listing(problems))
    return [
        ServerReport(
            server.client.url, f"{server.engine} {server.version}", None, server in new, check,
            unloaded=gone if isinstance(gone, tuple) else (),
        )
        for server, check, gone in zip(servers, checks, unloaded, strict=True)
    ]  # fmt: skip


def _has_adapter(server: Server, name: str) -> bool:
    """Whether it is loaded. Raises EngineError for a server that is paused or loading weights: it would not answer."""
    if (server.weight_version() or "").endswith(_LOADING) or server.is_paused():
        raise EngineError(
            f"{server.client.url}: paused, or between two versions of its weights; if no other publish is under way, "
            "publish full weights again"
        )
    return name in server.served().adapters


def _load_adapter(server: Server, adapter: _Adapter, options: PublishOptions) -> None:
    server.load_adapter(adapter.name, adapter.folder.there)
    if options.version is not None:  # another adapter of this name may have left its states in a cache
        server.drop_caches()


def _check_adapter(server: Server, adapter: _Adapter) -> str:
    """The result of the checks. Raises EngineError if the server does not list the adapter, or does not apply it."""
    served, url = server.served(), server.client.url
    if adapter.name not in served.adapters:
        raise EngineError(f"{url}: {adapter.name}: not in its list of models after it was loaded")
    path = served.adapters[adapter.name]
    if path is not None and path != adapter.folder.there:
        raise EngineError(
            f"{url}: {adapter.name}: loaded from {path}, expected {adapter.folder}; give another version="
        )
    if adapter.reference is None:
        return "listed"
    if adapter.reference.is_neutral:
        return "listed; the adapter changes nothing, so its answers prove nothing"
    base, adapted = probe(server, served.base), probe(server, server.model_name(served.base, adapter.name))
    moved = _distance(base, adapted)
    if moved < _ALIKE:
        raise EngineError(
            f"{url}: {adapter.name}: answers as the base does; the server does not apply it (names of its layers?), or "
            "it is too close to the base for three prompts: then check='listed'"
        )
    if adapter.reference.base is None or adapter.reference.adapted is None:
        return f"listed; answers differ from the base's by up to {moved:.3f}"
    error, other = _distance(adapter.reference.adapted, adapted), _distance(adapter.reference.base, adapted)
    if error > _NEAR or (error > other and _distance(adapter.reference.base, adapter.reference.adapted) > 2 * _NEAR):
        raise EngineError(
            f"{url}: {adapter.name}: its log probabilities are {error:.3f} from those of transformers and PEFT, "
            f"expected at most {_NEAR}; the server applies it otherwise (scaling, order of layers?)"
        )
    return f"listed; answers are those of transformers and PEFT within {error:.3f}"


def _unload_older(server: Server, name: str, keep: int) -> tuple[str, ...]:
    """Unload all but the `keep` newest of the older versions under the same name."""
    mine = [other for other in server.served().adapters if other.partition("@")[0] == name.partition("@")[0]]
    older = sorted((other for other in mine if _natural_order(other) < _natural_order(name)), key=_natural_order)
    gone = older[: max(0, len(older) - keep)]
    for other in gone:
        server.unload_adapter(other)
    return tuple(gone)


def _natural_order(text: str) -> list[Any]:
    return [(0, int(each), "") if each.isdecimal() else (1, 0, each) for each in re.split(r"(\d+)", text) if each]


def _distance(one: list[list[float]], other: list[list[float]]) -> float:
    """The largest difference of log probabilities, over as many as both have."""
    pairs = (pair for first, second in zip(one, other, strict=True) for pair in zip(first, second, strict=False))
    return max((abs(a - b) for a, b in pairs), default=0.0)


def _reference(
    held: OpenCheckpoint, record: PartRecord, file: TensorFile, options: PublishOptions
) -> _Reference | None:
    if options.check == "listed":
        return None
    outer = [name for name in file.specs if name.endswith("lora_B.weight")]
    is_neutral = bool(outer) and not any(bool(file.read(name).any()) for name in outer)
    if options.base is None or is_neutral:
        return _Reference(is_neutral)
    from ft_ckpt.engines.reference import reference_answers  # loads the models

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
    options: PublishOptions


@dataclass
class _Update:
    """One server during a publish of weights."""

    server: Server
    before: str | None = None
    base: str = ""  # the served model name
    base_path: str | None = None  # the path of its initial weights
    is_new: bool = True
    has_begun: bool = False  # its weights or its reported version may differ from `before`
    paused_at: float | None = None
    paused_seconds: float = 0.0
    digests: Mapping[str, str] | None = None
    checked: str = _UNCHECKED


def _publish_weights(servers: Sequence[Server], weights: _Weights) -> tuple[str, list[ServerReport]]:
    """Pause all servers, load and compare, set the version, resume; after a failure restore the previous version.

    Returns the name of the served model, and a report of each server.
    """
    updates = [_Update(server) for server in servers]
    if problems := _problems(_on_each(updates, lambda update: _prepare(update, weights))):
        raise EngineError(f"{listing(problems)}; nothing was loaded, all servers hold what they held before")
    new = [update for update in updates if update.is_new]
    try:
        problems = _problems(_on_each(new, lambda update: _load_weights(update, weights))) or _unlike(updates)
        if not problems:
            problems = _problems(_on_each(new, lambda update: update.server.set_weight_version(weights.version)))
        held = _put_all_back(new, weights) if problems else []
    except BaseException:  # such as KeyboardInterrupt
        LOG.warning("%s: publish interrupted: %s", weights.version, listing(_put_all_back(new, weights)))
        raise
    finally:
        paused = _problems(_on_each(new, _resume))
    if problems:
        raise EngineError("; ".join([*problems, *(held or ["all servers hold what they held before"]), *paused]))
    if paused:
        raise EngineError(f"{listing(paused)}; all servers hold {weights.version}")
    return updates[0].base, [
        ServerReport(
            update.server.client.url, f"{update.server.engine} {update.server.version}", update.before, update.is_new,
            update.checked, update.paused_seconds,
        )
        for update in updates
    ]  # fmt: skip


def _prepare(update: _Update, weights: _Weights) -> None:
    """Query the current weights of the server. Raises EngineError if the served model has other shapes."""
    server = update.server
    served = server.served()
    update.before, update.base, update.base_path = server.weight_version(), served.base, served.base_path
    if update.before == weights.version:
        update.paused_at = time.monotonic()  # a killed publisher may have left it paused
        _resume(update)
        update.paused_seconds = 0.0
        is_other = _difference(update, weights) is not None
        is_compared = update.checked != _UNCHECKED
        update.is_new = is_other or not (is_compared or weights.options.version is None)
        return
    base = _base_here(update, weights)
    theirs = {} if base is None else _config_in(LocalStore(base))
    for name in _SHAPE_FIELDS if theirs else ():
        if theirs.get(name) != weights.config.get(name):
            raise EngineError(
                f"{server.client.url}: config.json: {name} {weights.config.get(name)} in {weights.folder}, "
                f"{theirs.get(name)} in that of the served model, {base}; start a server with this model"
            )


def _load_weights(update: _Update, weights: _Weights) -> None:
    server = update.server
    update.paused_at = time.monotonic()
    server.pause(weights.options.in_flight)
    update.has_begun = True
    server.set_weight_version(weights.version + _LOADING)
    server.load_weights(weights.folder.there)
    if wrong := _difference(update, weights):
        raise EngineError(wrong)


def _difference(update: _Update, weights: _Weights) -> str | None:
    """How the digests of the server differ from those of the files; None if they do not, or are not compared."""
    server = update.server
    update.checked = _UNCHECKED
    if weights.options.check == "listed":
        return None
    update.digests = server.digests()
    if update.digests == {} and update.paused_at is not None:  # some versions do not compute them while paused
        server.resume()
        update.digests = server.digests()
        server.pause(weights.options.in_flight)
    if not update.digests:
        return None
    found = compare_digests(update.digests, weights.file, weights.config)
    if found.different and is_known(weights.config):
        return (
            f"{server.client.url}: {found.different[0]}: its SHA-256 is not that of the files in {weights.folder}, as "
            f"of {len(found.different)} of {found.total} parameters; does the server see another copy of that folder?"
        )
    if found.equal:
        update.checked = str(found)
    return None


def _unlike(updates: Sequence[_Update]) -> list[str]:
    """A line for each server whose parameters differ from those of the first one with the same engine and names."""
    found = []
    for update in updates:
        first = next(
            each
            for each in updates
            if each.server.engine == update.server.engine
            and (each.digests or {}).keys() == (update.digests or {}).keys()
        )
        names = [name for name, digest in (update.digests or {}).items() if digest != (first.digests or {})[name]]
        if names:
            url, other = update.server.client.url, first.server.client.url
            found.append(f"{url}: {names[0]}: one of {len(names)} parameters that differ from those on {other}")
    return found


def _put_all_back(updates: Sequence[_Update], weights: _Weights) -> list[str]:
    """Restore the previous weights on each server whose update has begun; a line for each on the weights it now has."""
    return _on_each([update for update in updates if update.has_begun], lambda update: _put_back(update, weights))


def _put_back(update: _Update, weights: _Weights) -> str:
    url, before = update.server.client.url, update.before
    try:
        with _weights_before(update, weights) as old:
            if old is None:
                return f"{url} may hold a part of {weights.version}: where its version {before} came from is not known"
            update.server.load_weights(old if isinstance(old, str) else old.folder.there)
            if not isinstance(old, str) and (wrong := _difference(update, old)):
                raise EngineError(wrong)
            update.server.set_weight_version(str(before))
    except (CheckpointError, OSError) as error:
        return f"{url} may hold a part of {weights.version}, and {before} was not loaded again ({error})"
    return f"{url} holds {before} again"


@contextmanager
def _weights_before(update: _Update, weights: _Weights) -> Iterator["_Weights | str | None"]:
    """The previous weights: a checkpoint beside this one, or the server's initial weights.

    A path if only the servers see them; None if they are unknown.
    """
    options = weights.options
    if update.before == _FIRST_VERSION:
        base = _base_here(update, weights)
        if base is None:
            yield update.base_path
            return
        with closing(open_folder(open_place(base))) as file:
            folder = _Folder(base, str(update.base_path))
            yield _Weights(_FIRST_VERSION, folder, base, file, _config_in(LocalStore(base)), options)
        return
    found = re.fullmatch(r"([^/]+)/([^/#]+)#([0-9a-f]{16})", update.before or "")
    if found is None:
        yield None
        return
    here = weights.checkpoint.absolute().parent
    for path in (here / found[2], *(folder / found[1] / found[2] for folder in here.parents[:2])):
        if LocalStore(path).stat(MANIFEST_NAME) is None:
            continue
        with _opened(open_place(path), options) as (held, record):
            if not held.identity.startswith(found[3]):
                continue  # from another run, or saved again since
            folder, place = _Folder.of(held.path / record.path, options), Place(held.store, record.path)
            with closing(open_folder(place, Place(held.origin, record.path))) as file:
                yield _Weights(str(update.before), folder, held.path, file, _config_in(place.folder), options)
            return
    raise EngineError(f"it is neither in {here} nor in a run {found[1]!r} beside it, or was saved again since")


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
                raise EngineError(f"{error}; {update.server.client.url} may be PAUSED: resume it by hand") from None
            time.sleep(_RESUME_PAUSE_SECONDS)
    update.paused_seconds, update.paused_at = time.monotonic() - update.paused_at, None
