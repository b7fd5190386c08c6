"""Defines the report of a publish."""

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
    """The version of the previous weights. None for an adapter, and if the server reports none."""
    is_new: bool
    """False if the server already held this version, so that nothing was loaded."""
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
    """"adapter" or "weights". In a chain "anchor" (a whole checkpoint) or "delta"."""
    name: str
    """The model name for requests: the name of an adapter with its version (on SGLang "BASE:NAME"),
    or the name of the base. For a chain, the name of the chain.
    """
    version: str
    """The version: what follows "@" in the name of an adapter, or what servers report for weights.
    For a chain, the name of the entry.
    """
    servers: tuple[ServerReport, ...]
    """The servers, in the order of their URLs."""
    seconds: float
    """The time from the call to the last answer."""
