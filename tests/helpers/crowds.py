"""Measured costs of a save and a resume with many ranks: see tests/workers/crowd.py."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch import launch


@dataclass(frozen=True)
class CrowdFigures:
    """Cost of one phase, over all ranks."""

    put: int  # bytes that all ranks put into the store
    got: int  # bytes that all ranks got
    most_got: int  # by one rank that is not rank 0
    leader_got: int
    calls: int
    leader_seconds: float  # CPU time
    rank_seconds: float  # CPU time of a rank that is not rank 0
    wall_seconds: float
    leader_peak: int  # bytes of memory above what its process began with


def crowd(
    size: int, folder: Path, way: str = "whole", processes: int = 3, timeout: float = 110
) -> dict[str, CrowdFigures]:
    """Measure each phase with `size` ranks; `way` is an argument of the worker."""
    folder.mkdir(parents=True)
    result = launch("crowd", processes, [folder / "run", folder / "figures", size, way], timeout)
    if result.returncode:
        raise AssertionError(result.log[-6000:])
    figures = []
    for number in range(processes):
        figures.append(json.loads((folder / f"figures.{number}").read_text()))
    return {phase: _of_phase(phase, figures) for phase in ("first save", "second save", "resume")}


def _of_phase(phase: str, figures: list[Mapping[str, Any]]) -> CrowdFigures:
    """Combine the figures of all processes; the ranks but the first share all but the first."""
    counts: dict[int, Mapping[str, int]] = {}
    for of_process in figures:
        for rank, of_rank in of_process[f"{phase} counts"].items():
            counts[int(rank)] = of_rank
    received = {rank: of_rank.get("got", 0) for rank, of_rank in counts.items()}
    leader, *others = figures
    return CrowdFigures(
        put=sum(of_rank.get("put", 0) for of_rank in counts.values()),
        got=sum(received.values()),
        most_got=max(received[rank] for rank in received if rank),
        leader_got=received[0],
        calls=sum(of_rank["calls"] for of_rank in counts.values()),
        leader_seconds=leader[phase]["cpu"],
        rank_seconds=sum(process[phase]["cpu"] for process in others) / (len(counts) - 1),
        wall_seconds=max(process[phase]["wall"] for process in figures),
        leader_peak=leader[phase]["peak"] - leader["base"],
    )
