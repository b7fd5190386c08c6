"""Loads an adapter on servers, and proves that they apply it.

Each version of an adapter has a name of its own, and is never loaded again under that name, because
servers key their caches by the name.

The answers of a model are its highest log probabilities after a few fixed prompts; see `probe`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ft_ckpt.errors import EngineError, listing
from ft_ckpt.extensions.rl.engines import EQUAL_WITHIN, ROUNDING, Answers, Server, distance, probe
from ft_ckpt.extensions.rl.publishing.on_servers import errors_on
from ft_ckpt.extensions.rl.publishing.reports import PublishReport, ServerReport
from ft_ckpt.extensions.rl.publishing.source import PublishedPart, ServedFolder
from ft_ckpt.extensions.rl.publishing.weights_update import LOADING
from ft_ckpt.formats.files import TensorFile
from ft_ckpt.messages import LOG


@dataclass(frozen=True)
class _Reference:
    """The expected answers of an adapter.

    Attributes:
        is_neutral: Whether the adapter changes nothing, so that its answers equal the base's.
        base: The answers of transformers with the base, if they are compared.
        adapted: The answers of transformers and PEFT with the adapter, if they are compared.
    """

    is_neutral: bool
    base: Answers | None = None
    adapted: Answers | None = None


@dataclass(frozen=True)
class _Adapter:
    """The adapter to load.

    Attributes:
        name: Its name on the servers, with the version.
        folder: Its folder.
        reference: The expected answers, or None if answers are not compared.
        has_given_version: Whether the caller gave the version in its name. Otherwise the name has
            the digest of its content.
    """

    name: str
    folder: ServedFolder
    reference: _Reference | None
    has_given_version: bool


@dataclass
class _Target:
    """One server during the publish.

    Attributes:
        server: The server.
        weights: The version of the server's weights, on which the adapter is loaded.
        is_new: Whether this publish loads the adapter. It may be loaded already.
        checked: What was compared, in words.
        unloaded: The older versions that were unloaded.
    """

    server: Server
    weights: str | None = None
    is_new: bool = True
    checked: str = ""
    unloaded: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        return self.server.client.url


def publish_adapter(
    servers: Sequence[Server],
    part: PublishedPart,
    file: TensorFile,
    uncompared: Mapping[str, str],
) -> PublishReport:
    """Load the adapter on all servers, and compare their answers.

    If one server fails, the adapter is unloaded from all servers on which it was new. `uncompared`
    has, by URL, the reason why the base of a server was not compared. Raises EngineError.
    """
    reference = _reference(part, file)
    folder = part.served_folder()
    adapter = _Adapter(part.adapter_name, folder, reference, part.has_given_version)
    targets = [_Target(server) for server in servers]
    problems = errors_on(targets, _prepare, adapter)
    if problems:
        raise EngineError(f"{listing(problems)}; no adapter was loaded")
    new = [target for target in targets if target.is_new]
    problems = errors_on(new, _load, adapter)
    if not problems:
        problems = errors_on(targets, _check, adapter)
    if problems:
        raise _unload_new(new, adapter, problems)
    still_loaded = errors_on(targets, _unload_older, adapter.name, part.options.keep)
    problems = errors_on(targets, _expect_same_weights, adapter)
    problems += errors_on(targets, _expect_listed, adapter)
    if problems:
        raise _unload_new(new, adapter, problems)
    if still_loaded:
        LOG.warning(
            "%s: published, but older versions are still loaded: %s",
            adapter.name,
            listing(still_loaded),
        )

    return PublishReport(
        path=part.checkpoint.location,
        kind="adapter",
        name=adapter.name,
        version=adapter.name.partition("@")[2],
        servers=tuple(_report(target, uncompared) for target in targets),
        seconds=0.0,
    )


def _report(target: _Target, uncompared: Mapping[str, str]) -> ServerReport:
    checked = target.checked
    if target.url in uncompared:
        checked = f"{checked}; its base was not compared: {uncompared[target.url]}"
    return ServerReport(
        url=target.url,
        engine=f"{target.server.engine} {target.server.version}",
        before=None,
        is_new=target.is_new,
        checked=checked,
        unloaded=target.unloaded,
    )


def _unload_new(new: Sequence[_Target], adapter: _Adapter, problems: Sequence[str]) -> EngineError:
    """Unload the adapter from the servers on which it was new.

    Returns the error that says so, and what the servers hold now.
    """
    # If a target is not new any more, another publisher has loaded the adapter there.
    loaded = [target for target in new if target.is_new]
    failures = errors_on(loaded, _unload, adapter.name)
    failure_text = ""
    if failures:
        failure_text = f"; {listing(failures)}: it may hold {adapter.name} now"
    unloaded: set[str] = set()
    for target in new:
        unloaded.update(target.unloaded)
    if unloaded:
        older_text = f"{listing(sorted(unloaded), ', ')}: unloaded before"
    else:
        older_text = "older versions answer as before"

    return EngineError(
        f"{listing(problems)}; {adapter.name} (from {adapter.folder}) was unloaded where it "
        f"was new; {older_text}{failure_text}"
    )


def _prepare(target: _Target, adapter: _Adapter) -> None:
    """Find out whether the adapter is loaded already.

    Raises EngineError for a server that is paused or loading weights, because it would not answer.
    Raises it also if the adapter is loaded and the caller gave its version, because the server does
    not say which files it has read under this name.
    """
    server = target.server
    target.weights = server.weight_version()
    if (target.weights or "").endswith(LOADING) or server.is_paused():
        raise EngineError(
            f"{target.url}: paused, or between two versions of its weights; if no other "
            "publish is under way, publish full weights again"
        )
    target.is_new = adapter.name not in server.served().adapters
    if adapter.has_given_version and not target.is_new:
        raise _already_loaded(target, adapter)


def _already_loaded(target: _Target, adapter: _Adapter) -> EngineError:
    return EngineError(
        f"{target.url}: {adapter.name}: loaded already, and whether from these files "
        "is not known; give another version=, or none: then the name has the digest of the files"
    )


def _load(target: _Target, adapter: _Adapter) -> None:
    server = target.server
    target.is_new = server.load_adapter(adapter.name, adapter.folder.path_on_servers)
    if not adapter.has_given_version:
        return
    if not target.is_new:
        raise _already_loaded(target, adapter)
    # The caches may have states of another adapter that had this name.
    server.drop_caches()


def _unload(target: _Target, name: str) -> None:
    target.server.unload_adapter(name)


def _unload_older(target: _Target, name: str, keep: int) -> None:
    """Unload all but the `keep` newest of the older versions under the same name."""
    adapter_name, _, _ = name.partition("@")
    older = []
    for loaded in target.server.served().adapters:
        is_version = loaded.partition("@")[0] == adapter_name
        if is_version and _natural_order(loaded) < _natural_order(name):
            older.append(loaded)
    older.sort(key=_natural_order)
    for version in older[: max(0, len(older) - keep)]:
        target.server.unload_adapter(version)
        target.unloaded = (*target.unloaded, version)


def _natural_order(text: str) -> list[tuple[int, int, str]]:
    """Return a key that sorts the numbers in a text by value. For example, "a@9" < "a@10"."""
    key = []
    for piece in re.split(r"(\d+)", text):
        if piece.isdecimal():
            key.append((0, int(piece), ""))
        elif piece:
            key.append((1, 0, piece))
    return key


def _expect_same_weights(target: _Target, adapter: _Adapter) -> None:
    """Raise EngineError if the server's weights were replaced since the adapter was compared."""
    version = target.server.weight_version()
    if version != target.weights:
        raise EngineError(
            f"{target.url}: its weights were {target.weights} and are {version} now: "
            "it was restarted, or another publisher has replaced them; the answers of "
            f"{adapter.name} were compared on others"
        )


def _expect_listed(target: _Target, adapter: _Adapter) -> None:
    """Raise EngineError if the server does not list the adapter, or lists it with another path."""
    adapters = target.server.served().adapters
    if adapter.name not in adapters:
        raise EngineError(
            f"{target.url}: {adapter.name}: not in its list of models after it was loaded; was it "
            "restarted, or does another publisher unload adapters there?"
        )
    path = adapters[adapter.name]
    if path is not None and path != adapter.folder.path_on_servers:
        raise EngineError(
            f"{target.url}: {adapter.name}: loaded from {path}, expected {adapter.folder}; "
            "give another version="
        )


def _check(target: _Target, adapter: _Adapter) -> None:
    """Raise EngineError if the server does not list the adapter, or does not apply it."""
    _expect_listed(target, adapter)
    target.checked = _compare_answers(target.server, adapter)


def _compare_answers(server: Server, adapter: _Adapter) -> str:
    """Compare the server's answers with the adapter's, and return the result as text.

    Raises EngineError for answers that are not the adapter's.
    """
    reference = adapter.reference
    if reference is None:
        return "listed"
    if reference.is_neutral:
        return "listed; the adapter changes nothing, so its answers prove nothing"
    url, model = server.client.url, server.served().base
    base = probe(server, model)
    adapted = probe(server, server.model_name(model, adapter.name))
    moved = distance(base, adapted)
    if moved < EQUAL_WITHIN:
        raise EngineError(
            f"{url}: {adapter.name}: answers as the base does; the server does not apply it (names "
            "of its layers?), or it is too close to the base for three prompts: then check='listed'"
        )

    if reference.base is None or reference.adapted is None:
        return f"listed; answers differ from the base's by up to {moved:.3f}"
    error = distance(reference.adapted, adapted)
    error_of_base = distance(reference.base, adapted)

    # Processors that multiply in bfloat16 have larger errors than others.
    rounding = distance(reference.base, base)
    limit = max(ROUNDING, 2 * min(rounding, ROUNDING))
    is_distinct = distance(reference.base, reference.adapted) > 2 * ROUNDING
    if error > limit or (is_distinct and error > error_of_base):
        raise EngineError(
            f"{url}: {adapter.name}: its log probabilities are {error:.3f} from those of "
            f"transformers and PEFT, expected at most {limit:.3g}; the server applies it otherwise "
            "(scaling, order of layers?)"
        )

    return f"listed; answers are those of transformers and PEFT within {error:.3f}"


def _reference(part: PublishedPart, file: TensorFile) -> _Reference | None:
    """Return the expected answers, or None if `check` is "listed"."""
    options = part.options
    if options.check == "listed":
        return None
    # A LoRA adapter changes nothing if all its matrices B are zero.
    outer_names = [name for name in file.specs if name.endswith("lora_B.weight")]
    has_values = any(bool(file.read(name).any()) for name in outer_names)
    is_neutral = bool(outer_names) and not has_values
    if options.base is None or is_neutral:
        return _Reference(is_neutral)
    from ft_ckpt.extensions.rl.engines import reference_answers  # loads the models

    base, adapted = reference_answers(part.checkpoint.path, part.record.name, options.base)
    return _Reference(False, base, adapted)
