"""Reports a load, and raises for differences in a strict load."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ft_ckpt.checkpoint import OpenCheckpoint
from ft_ckpt.errors import LoadError, listing
from ft_ckpt.model.load.request import LoadOptions


@dataclass(frozen=True)
class LoadReport:
    """Result of a load. A strict load raises for missing, unexpected or reshaped names."""

    path: str | Path
    """The checkpoint: its path, or its URL."""
    part: str
    """The part that was loaded; "" for the whole checkpoint."""
    missing: tuple[str, ...] = ()
    """Names in the model and not in the files."""
    unexpected: tuple[str, ...] = ()
    """Names in the files and not in the model."""
    reshaped: tuple[str, ...] = ()
    """Names of tensors whose shape in the model differs, with both shapes where known."""
    tensors: int = 0
    """Number of tensors that were loaded."""
    zero_copy: bool = False
    """True if the parameters are mapped files (copy-on-write)."""
    notes: tuple[str, ...] = ()
    """Decisions of the load that affect the model."""


def refuse_differences(report: LoadReport, strict: bool) -> None:
    """Raise LoadError naming everything that differs, if the load is `strict`."""
    problems = [f"{name}: missing in the files" for name in report.missing]
    problems += [f"{name}: not in the model" for name in report.unexpected]
    problems += list(report.reshaped)
    if strict and problems:
        raise LoadError(
            f"{listing(problems)}: {len(problems)} difference(s) between "
            f"{report.path} and the model; load it into the class it was saved from, "
            "or pass strict=False to take what fits"
        )


def report_load(
    checkpoint: OpenCheckpoint,
    part: str | None,
    reports: Sequence[LoadReport],
    options: LoadOptions,
) -> LoadReport:
    """Join the reports of all loaded models to one report."""
    missing: list[str] = []
    unexpected: list[str] = []
    reshaped: list[str] = []
    notes: list[str] = []
    for report in reports:
        missing += report.missing
        unexpected += report.unexpected
        reshaped += report.reshaped
        notes += report.notes

    folder = checkpoint.place.folder
    is_copied = options.device is not None and options.device.type != "cpu"
    return LoadReport(
        folder.local_folder or folder.url,
        part or "",
        tuple(missing),
        tuple(unexpected),
        tuple(reshaped),
        tensors=sum(report.tensors for report in reports),
        zero_copy=all(report.zero_copy for report in reports) and not is_copied,
        notes=tuple(notes),
    )
