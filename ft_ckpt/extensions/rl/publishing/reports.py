"""Reports of publishes."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ServerReport:
    """One server after a publish.

    For a chain, the report is about its new entry, with the kind as `engine` and the base as
    `before`.
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
