"""Checks the options of `publish`, all of them before anything is sent."""

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from typing_extensions import Self, Unpack

from ft_ckpt.errors import (
    ConfigError,
    Rule,
    check_settings,
    is_number,
    listing,
    refuse_unknown_fields,
)
from ft_ckpt.extensions.rl.engines.client import Client
from ft_ckpt.storage.places import Place, is_url

_KINDS = ("auto", "adapter", "weights")
_IN_FLIGHT = ("wait", "keep", "abort")
_CHECKS = ("all", "listed")
_MIN_TIMEOUT_SECONDS = 0.001
_MAX_TIMEOUT_SECONDS = 30 * 24 * 3600.0  # far below what a timer can take
_CHAIN_OPTIONS = ("delta", "anchor_every")


class ServerSettings(TypedDict, total=False):
    """The fields of `ServerOptions` but `url`, so that type checkers and editors know keywords."""

    name: str | None
    version: str | None
    kind: Literal["auto", "adapter", "weights"]
    part: str | None
    visible_at: Mapping[str, str] | None
    stage: str | os.PathLike[str] | None
    keep: int
    in_flight: Literal["wait", "keep", "abort"]
    check: Literal["all", "listed"]
    base: Any
    headers: Mapping[str, str] | None
    timeout_seconds: float
    delta: bool
    anchor_every: int


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Where `publish` publishes a checkpoint, and how.

    The fields are the keywords of `publish`, of `CheckpointSaver.publish`, of the setting `publish`
    and of `ft-ckpt publish`. Raises ConfigError naming all invalid ones.
    """

    url: tuple[str, ...] = ()
    """The addresses of one server or of several. With `delta`, the folder or URL of one chain.

    The constructor also takes one address as text.
    """
    name: str | None = None
    """The name of an adapter on the servers. By default it is the name of the run's folder, with
    the name of the part if there are several adapters.
    """
    version: str | None = None
    """The name of the version. By default it is made from the step and the manifest.

    A version is never loaded again under its name.
    """
    kind: Literal["auto", "adapter", "weights"] = "auto"
    """What to publish: an adapter or full weights. "auto" publishes what the checkpoint has."""
    part: str | None = None
    """The name of the part to publish if the checkpoint has several."""
    visible_at: Mapping[str, str] = field(default_factory=dict)
    """The paths at which the servers see folders of this machine, as in {"/mnt/runs":
    "/data/runs"}.
    """
    stage: Path | None = None
    """A folder that servers see. Checkpoints that are pulled from a bucket or rebuilt from a chain
    are stored there, and so are exports of adapters that the engine would misread. Without it,
    checkpoints are stored in the cache, and such adapters are refused.
    """
    keep: int = 2
    """How many older versions of an adapter stay loaded, at least 0."""
    in_flight: Literal["wait", "keep", "abort"] = "wait"
    """What happens to running requests while weights are replaced: "wait" for their end, "keep"
    them until generation resumes, or "abort" them.
    """
    check: Literal["all", "listed"] = "all"
    """What is compared: "all", or "listed", which only asks whether the checkpoint is loaded and
    compares neither digests nor answers.
    """
    base: Any = None
    """The base model of an adapter, or its path or name. If it is given, answers are also compared
    with those of transformers and PEFT.
    """
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """HTTP headers that are sent with each request.

    Unless they include Authorization, FT_CKPT_ENGINE_TOKEN is sent as a bearer token.
    """
    timeout_seconds: float = 300.0
    """The time limit of one request, from 0.001 s to 30 days."""
    delta: bool = False
    """Whether the checkpoint is appended to the chain of deltas at `url`, a folder on a disk or in
    a bucket.
    """
    anchor_every: int = 10
    """An entry of a chain holds the whole checkpoint every `anchor_every` entries, at least 1."""

    # The constructor accepts more types than the fields have: one URL as text, None for a mapping.
    if TYPE_CHECKING:

        def __init__(
            self, *, url: str | Sequence[str], **settings: Unpack[ServerSettings]
        ) -> None: ...

    def __new__(cls, *values: Any, **settings: Any) -> Self:
        refuse_unknown_fields(cls, values, settings)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self._set(url=_urls_in(self.url), stage=_folder_of(self.stage))
        self._set(visible_at=_mapping(self.visible_at), headers=_mapping(self.headers))
        check_settings(self, _RULES)
        if not _is_header_map(self.headers):
            # The message does not quote the headers, because they may contain tokens.
            raise ConfigError("headers: expected names with values, all text")
        self._set(timeout_seconds=float(self.timeout_seconds))
        self._check_chain()
        self._check_urls()

    def clients(self) -> list[Client]:
        """Return a client of each server.

        Raises ConfigError for an address, a header or a token that cannot be sent.
        """
        return [Client(url, self.headers, self.timeout_seconds) for url in self.url]

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check_chain(self) -> None:
        """Raise ConfigError for options of servers if `delta`, and for those of chains if not."""
        given = set()
        for option in fields(self):
            has_default = option.default is not MISSING
            if has_default and getattr(self, option.name) != option.default:
                given.add(option.name)
        if self.delta:
            wrong = given - {"url", *_CHAIN_OPTIONS}
            reason = "of servers; a chain (delta=True) has no such"
        else:
            wrong = given & {"anchor_every"}
            reason = "of chains; give delta=True"
        if wrong:
            raise ConfigError(f"{listing(sorted(wrong), ', ')}: {reason}")

    def _check_urls(self) -> None:
        """Raise ConfigError for invalid or repeated URLs, and for servers mixed with a chain.

        A chain needs `delta`, which takes one chain and no server.
        """
        distinct = {url.rstrip("/") for url in self.url}
        if not distinct or len(distinct) < len(self.url):
            raise ConfigError(
                f"{', '.join(self.url) or 'no url'}: expected one or more servers, each once"
            )

        if not self.delta:
            self.clients()
            return

        for url in self.url:
            if url.partition("://")[0].lower() in ("http", "https"):
                raise ConfigError(
                    f"{url}: delta=True appends to a chain, expected a folder or a bucket; a "
                    "server gets an entry of the chain by another publish, with stage="
                )

        if len(self.url) > 1:
            raise ConfigError(f"{', '.join(self.url)}: expected one chain")


def server_options(
    url: str | Sequence[str] | ServerOptions, settings: Mapping[str, Any]
) -> ServerOptions:
    """Return the options that were given as an object, or as URLs and keywords.

    Raises ConfigError for an object with keywords, and for invalid options.
    """
    if not isinstance(url, ServerOptions):
        return ServerOptions(url=url, **settings)
    if settings:
        raise ConfigError(
            f"ServerOptions and {', '.join(sorted(settings))}= were both given; "
            "use one of the two ways"
        )
    return url


def _urls_in(url: Any) -> tuple[str, ...]:
    """Return the URLs in an argument that is one URL or several.

    Raises ConfigError if they are not text.
    """
    has_several = isinstance(url, Iterable) and not isinstance(url, (str, bytes, Mapping))
    urls: tuple[Any, ...] = tuple(url) if has_several else (url,)
    for text in urls:
        if not _is_text(text):
            raise ConfigError(
                f"url={text!r}: expected the address of a server or a chain as text, or several"
            )
    return urls


def _folder_of(stage: Any) -> Path | None:
    """Return the folder in the argument `stage`.

    Raises ConfigError for anything but a local folder or None.
    """
    if stage is None:
        return None
    text = os.fspath(stage) if isinstance(stage, (str, os.PathLike)) else stage
    if not _is_path(text):
        raise ConfigError(f"stage={stage!r}: expected a folder of this machine, or None")
    return Path(text)


def _mapping(value: Any) -> Any:
    return {} if value is None else value


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and "\0" not in value


def _is_name(value: Any) -> bool:
    if value is None:
        return True
    return isinstance(value, str) and re.fullmatch(r"[\w.-]+", value) is not None


def _is_path(text: Any) -> bool:
    return _is_text(text) and bool(text) and not is_url(text)


def _is_map_of_folders(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_path, [*value, *value.values()]))


def _is_base(value: Any) -> bool:
    is_model = callable(getattr(value, "named_modules", None))
    return value is None or is_model or isinstance(value, Place) or _is_text(os.fspath(value))


def _is_header_map(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    return all(isinstance(text, str) for text in [*value, *value.values()])


def _one_of(name: str, choices: Sequence[str]) -> Rule:
    return (
        name,
        lambda value: isinstance(value, str) and value in choices,
        f"one of {', '.join(choices)}",
    )


_NAME = "letters, digits, dots, dashes and underscores"
_RULES: list[Rule] = [
    ("name", _is_name, _NAME),
    ("version", _is_name, _NAME),
    _one_of("kind", _KINDS),
    ("part", lambda part: part is None or isinstance(part, str), "the name of a part, or None"),
    ("visible_at", _is_map_of_folders, "folders of this machine with their paths on the servers"),
    ("keep", lambda keep: is_number(keep, 0, whole=True), "a number of older versions, at least 0"),
    _one_of("in_flight", _IN_FLIGHT),
    _one_of("check", _CHECKS),
    ("base", _is_base, "a model, the path or the name of one, or None"),
    (
        "timeout_seconds",
        lambda seconds: (
            is_number(seconds, _MIN_TIMEOUT_SECONDS, _MAX_TIMEOUT_SECONDS)
            and math.isfinite(seconds)
        ),
        f"a number of seconds from {_MIN_TIMEOUT_SECONDS:g} to {_MAX_TIMEOUT_SECONDS:,.0f}",
    ),
    ("delta", lambda delta: isinstance(delta, bool), "True or False"),
    (
        "anchor_every",
        lambda count: is_number(count, 1, whole=True),
        "a number of entries, at least 1",
    ),
]
