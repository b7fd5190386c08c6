"""Chooses the newest or the best valid checkpoint of a run."""

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from ft_ckpt.checkpoint.catalog.catalog import CheckpointInfo, list_readable
from ft_ckpt.checkpoint.checks import damage_of
from ft_ckpt.errors import CheckpointError, ConfigError, UnreadableError, listing
from ft_ckpt.messages import warn
from ft_ckpt.storage.places import Place, open_place


def latest(directory: str | os.PathLike[str] | Place) -> Path | str | None:
    """Return the newest checkpoint in `directory` that passes `verify(deep=False)`.

    Returns a local path or a URL, as `directory` is, or None if there is no such checkpoint or no
    such folder. Checkpoints computed from others (an average, a merged model) are skipped; invalid
    checkpoints are skipped with a warning. Raises UnreadableError if a newer checkpoint, or any
    manifest, cannot be read now, because it may be the newest; NotACheckpointError if `directory`
    is a file.
    """
    info = find_latest(open_place(directory))
    return None if info is None else info.path


def find_latest(directory: Place) -> CheckpointInfo | None:
    """Return the checkpoint whose location `latest` returns."""
    infos = _saved_by_training(list_readable(directory).checkpoints)
    return _first_valid(reversed(infos), "an older checkpoint")


def best(
    run: str | os.PathLike[str] | Place, metric: str | tuple[str, str] | None = None
) -> Path | str | None:
    """Return the best checkpoint, by a metric, of the newest run in the folder `run`.

    `metric` is (name, "min" or "max"). A name alone, or None if there is one metric, is looked up
    in the run's `Keep.best` and `Every.best`. NaN is never the best; of equal values, the oldest
    checkpoint is the best. Checkpoints that do not pass `verify(deep=False)` are skipped with a
    warning. Return None if no checkpoint has a number. Raises ConfigError if the metric or its
    direction is unknown; UnreadableError if a checkpoint that may be the best cannot be read now.
    """
    info = find_best(open_place(run), metric)
    return None if info is None else info.path


def find_best(run: Place, metric: str | tuple[str, str] | None = None) -> CheckpointInfo | None:
    """Return the checkpoint whose location `best` returns."""
    infos = _saved_by_training(list_readable(run).checkpoints)
    if not infos:
        return None
    newest_run = infos[-1].manifest.run_id
    infos = [info for info in infos if info.manifest.run_id == newest_run]
    name, mode = _chosen_ranking(infos, metric)
    sign = 1 if mode == "min" else -1
    ranked = [info for info in infos if not math.isnan(info.metrics.get(name, math.nan))]
    ranked.sort(key=lambda info: sign * info.metrics[name])
    return _first_valid(ranked, "the next best")


def _saved_by_training(infos: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
    # without checkpoints that were computed from others
    return [info for info in infos if not info.manifest.made_from]


def _first_valid(infos: Iterable[CheckpointInfo], instead: str) -> CheckpointInfo | None:
    """Return the first checkpoint that passes `verify(deep=False)`; warn of those before it.

    Raises UnreadableError if a checkpoint before it cannot be read now.
    """
    unread = ""  # the first error of a checkpoint that may be valid
    for info in infos:
        try:
            problems = damage_of(info.place)
        except UnreadableError as error:
            unread = unread or str(error)
            continue
        except CheckpointError as error:  # deleted or damaged since it was listed
            problems = (str(error),)

        if problems:
            if not unread:
                text = f"{info.path}: not valid, using {instead}: {'; '.join(problems)}"
                warn(text)
            continue

        if unread:
            raise UnreadableError(
                f"{unread}; the newest readable checkpoint is {info.path}: "
                "try again, or name that one"
            )

        return info

    if unread:
        raise UnreadableError(f"{unread}; no other checkpoint can be read: try again")
    return None


def _chosen_ranking(
    infos: Sequence[CheckpointInfo], metric: str | tuple[str, str] | None
) -> tuple[str, str]:
    """Return the name of the metric to rank by, and "min" or "max".

    Raises ConfigError if the metric or its direction is ambiguous or unknown.
    """
    if isinstance(metric, tuple) and len(metric) == 2 and metric[1] in ("min", "max"):
        return metric
    rankings: dict[str, str] = {}
    metrics: set[str] = set()
    for info in infos:
        rankings.update(info.manifest.rankings)
    candidates = [name for name in rankings if metric in (None, name)]
    if len(candidates) == 1:
        return candidates[0], rankings[candidates[0]]
    for info in infos:
        metrics.update(info.metrics)
    raise ConfigError(
        f"metric={metric!r}: expected (name, 'min' or 'max'); the run's Keep and Every rank by "
        f"{listing(sorted(rankings), ', ') or 'none'}, its checkpoints have "
        f"{listing(sorted(metrics), ', ') or 'no metrics'}"
    )
