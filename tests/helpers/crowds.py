"""Measured cost of a save and a resume with many ranks: see tests/workers/crowd.py."""

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
    """The figures of each phase with `size` ranks; `way` is an argument of the worker."""
    folder.mkdir(parents=True)
    result = launch("crowd", processes, [folder / "run", folder / "figures", size, way], timeout)
    if result.returncode:
        raise AssertionError(result.log[-6000:])
    found = [json.loads((folder / f"figures.{number}").read_text()) for number in range(processes)]
    return {phase: _of_phase(phase, found) for phase in ("first save", "second save", "resume")}


def _of_phase(phase: str, found: list[Mapping[str, Any]]) -> CrowdFigures:
    counts = {int(rank): each for one in found for rank, each in one[f"{phase} counts"].items()}
    others = [each.get("got", 0) for rank, each in counts.items() if rank]
    return CrowdFigures(
        put=sum(each.get("put", 0) for each in counts.values()),
        got=sum(each.get("got", 0) for each in counts.values()),
        most_got=max(others),
        leader_got=counts[0].get("got", 0),
        calls=sum(each["calls"] for each in counts.values()),
        leader_seconds=found[0][phase]["cpu"],
        rank_seconds=sum(one[phase]["cpu"] for one in found[1:]) / len(others),
        wall_seconds=max(one[phase]["wall"] for one in found),
        leader_peak=found[0][phase]["peak"] - found[0]["base"],
    )
