"""Averages checkpoints, weighted or not, slice by slice.

A place is a folder on a disk, a prefix in a bucket, or a file. A part of a checkpoint is one saved
model or one adapter. The share of a source is its weight divided by the sum of all weights.
"""

import math
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from ft_ckpt.checkpoint import hold_open
from ft_ckpt.checkpoint.catalog import list_readable
from ft_ckpt.checkpoint.checks import damage_of
from ft_ckpt.checkpoint.manifest import Manifest
from ft_ckpt.errors import ConfigError, LoadError, listing
from ft_ckpt.extensions.tools.averaging.averaged_file import AveragedFile
from ft_ckpt.extensions.tools.averaging.checks import (
    differing_bases,
    differing_part_settings,
    differing_shared_tensors,
    refuse_other_parts,
    refuse_quantised_sources,
)
from ft_ckpt.extensions.tools.converting import (
    ConvertOptions,
    ConvertReport,
    check_apart,
    convert_options,
    open_source,
    write_converted,
)
from ft_ckpt.formats.files import TensorFile
from ft_ckpt.model.files import WeightsFolder
from ft_ckpt.model.tensors import finite_numbers
from ft_ckpt.storage.places import Place, open_place


def average(
    sources: Sequence[str | Path | Place],
    dst: str | Path | Place,
    *,
    weights: Sequence[float] | None = None,
    last: int | None = None,
    format: str | None = None,  # noqa: A002
    dtype: str | None = None,
    max_shard_size: int | str | None = None,
    verify: bool = False,
    overwrite: bool = False,
    progress: bool = True,
) -> ConvertReport:
    """Write the average of the checkpoints `sources` to `dst`, a folder or file.

    The result is complete and durable when the call returns. A failed call leaves nothing.

    `sources` are two or more checkpoints, folders or files of the same tensors. They may also be
    the folder of one run, if `last` says how many of its newest valid checkpoints to average.
    `weights` has a number for each source. The numbers are scaled to a sum of 1. By default all are
    equal. Further arguments are those of `convert`.

    Floating-point tensors are averaged in float32 (float64 ones in float64) and rounded once to
    their dtype, or to `dtype`. Other tensors should be equal in all sources. If they differ, the
    tensor of the last source is taken, and the report names it. Indices of an adapter that differ
    and complex numbers are refused.

    All sources must store the same names, shapes and dtypes, with the same ties. Sidecar files
    (config, tokenizer) are those of the last source. Folders are refused if settings that change
    the output differ, if their tokenizers map one id to different tokens, or if they are quantised.
    Training state is not averaged. Adapters are averaged matrix by matrix, so the product of two
    averaged matrices is not the average of the products. They must have the same base.

    The manifest names the sources. `latest` and `best` skip an average, and a run's retention rules
    never delete it. Sources are compared with their digests before they are read.

    Raises ConfigError for invalid counts and weights. Raises SelectionError naming tensors that
    differ in name, shape, dtype or ties, or that have no mean. Raises LoadError naming settings and
    bases that differ. For files it raises what `convert` raises.
    """
    target = open_place(dst)
    places = _choose_sources([open_place(source) for source in sources], last)
    shares = normalized_weights(weights, len(places))
    names = tuple(place.basename for place in places)
    source_texts = list(names)
    if weights is not None:
        source_texts = [f"{name} ({share:.4g})" for name, share in zip(names, shares, strict=True)]
    options = convert_options(
        target,
        format=format,
        dtype=dtype,
        max_shard_size=max_shard_size,
        verify=verify,
        progress=progress,
        note=f"the average of {', '.join(source_texts)}",
        made_from=names,
        to_folder=str(dst).endswith("/"),
        overwrite=overwrite,
    )
    check_apart(places, options)
    with ExitStack() as stack:
        folders = [stack.enter_context(hold_open(place)) for place in places]
        files = [stack.enter_context(closing(open_source(place))) for place in folders]
        max_mode = 0o777
        for place in folders:
            max_mode &= place.mode_at(options.target)
        options = replace(options, max_mode=max_mode)
        averaged = _average_files(files, shares, options)
        report = write_converted(averaged, folders[-1], options)

    return replace(report, notes=(*report.notes, *_notes_of(averaged)))


def normalized_weights(weights: Sequence[float] | None, count: int) -> list[float]:
    """Scale the weights to a sum of 1. None means equal weights.

    Raises ConfigError unless they are `count` finite numbers whose sum is not 0.
    """
    if count < 2:
        raise ConfigError(
            f"{_counted(count, 'source')} given, expected two or more; or give a run with last="
        )
    numbers = [1.0] * count if weights is None else finite_numbers(weights)
    total = sum(numbers)
    shares = [number / total for number in numbers] if total else []
    is_finite = math.isfinite(total) and all(math.isfinite(share) for share in shares)
    if len(shares) != count or not is_finite:
        raise ConfigError(
            f"weights={weights!r}: expected {count} finite numbers whose sum is not 0"
        )
    return shares


def parse_weights(text: str | None) -> list[float] | None:
    """Parse numbers separated by commas. Raises ConfigError for other text."""
    if text is None:
        return None
    try:
        return [float(number) for number in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"weights={text!r}: expected numbers separated by commas, as in '1,2,1'"
        ) from None


def _choose_sources(sources: list[Place], last: int | None) -> list[Place]:
    """Return the sources, or the `last` newest valid checkpoints of a run, oldest first.

    Raises ConfigError if `last` is given with several sources, or if the run has too few.
    """
    if last is None:
        return sources
    if len(sources) != 1 or type(last) is not int or last < 2:
        count = _counted(len(sources), "source")
        raise ConfigError(f"last={last!r} with {count}: expected one run's folder, and 2 or more")

    run = sources[0]
    saved = [info for info in list_readable(run).checkpoints if not info.manifest.made_from]
    if not saved:
        raise ConfigError(
            f"{run}: no checkpoints of a run in it, {last} are wanted; give the folder that "
            "a run saves to, or the checkpoints themselves without last="
        )

    newest_run_id = saved[-1].manifest.run_id
    saved_by_run = [info for info in saved if info.manifest.run_id == newest_run_id]

    # The final export of a run repeats the weights of its last checkpoint, which must not count
    # twice. A run may have exports only.
    checkpoints = [info for info in saved_by_run if not info.manifest.export]
    if not checkpoints:
        checkpoints = saved_by_run
    valid: list[Place] = []
    for info in reversed(checkpoints):
        if len(valid) == last:
            break
        if not damage_of(info.place):
            valid.append(info.place)

    if len(valid) < last:
        count = _counted(len(valid), "valid checkpoint")
        raise ConfigError(
            f"{run}: {count} of its newest run, {last} are wanted; give a smaller last="
        )

    return valid[::-1]


def _average_files(
    files: Sequence[TensorFile], shares: Sequence[float], options: ConvertOptions
) -> TensorFile:
    """Return the averages as one file or folder that can be converted.

    It is a folder with the same parts if all sources are folders, and a file otherwise. Nothing is
    read yet but what the checks need.
    """
    names = options.made_from
    refuse_quantised_sources(files, names)
    folders = [file for file in files if isinstance(file, WeightsFolder)]
    if len(folders) < len(files):
        return AveragedFile(files, shares, names, options.dtype)
    refuse_other_parts(folders, names)
    problems = differing_shared_tensors(folders, names)
    last = folders[-1]
    parts = []
    for index, part in enumerate(last.parts):
        is_adapter = part.kind == "adapter"
        part_files = [folder.parts[index].file for folder in folders]
        file = AveragedFile(part_files, shares, names, options.dtype, is_adapter=is_adapter)
        problems += differing_part_settings(folders, index, names)
        if is_adapter:
            base_problems, notes = differing_bases(folders, index, names)
            problems += base_problems
            file.notes += notes
        parts.append(replace(part, file=file))

    if problems:
        raise LoadError(
            f"{listing(problems)}; only models of one config, or adapters of one base, have an "
            "average"
        )

    return WeightsFolder(last.place, parts, _averaged_manifest(last.manifest, names))


def _averaged_manifest(last: Manifest | None, names: Sequence[str]) -> Manifest | None:
    """Return the manifest of the last source without the fields about one step of a run."""
    if last is None:
        return None
    return replace(
        last,
        created=datetime.now(timezone.utc).isoformat(),
        step=None,
        metrics={},
        rankings={},
        run_id=None,
        number=None,
        notes=(),
        export=True,
        made_from=tuple(names),
    )


def _notes_of(averaged: TensorFile) -> list[str]:
    """Return sentences for the report. They are complete only after all tensors were read."""
    files = [averaged]
    if isinstance(averaged, WeightsFolder):
        files = [part.file for part in averaged.parts]
    notes: dict[str, None] = {}
    unequal: set[str] = set()
    beyond: set[str] = set()
    for file in files:
        if isinstance(file, AveragedFile):
            notes |= dict.fromkeys(file.notes)
            unequal |= file.unequal
            beyond |= file.beyond

    if unequal:
        tensors = listing(sorted(unequal), ", ")
        note = f"{tensors}: no floating-point numbers, and not equal; the last source's were taken"
        notes[note] = None

    if beyond:
        notes[f"{listing(sorted(beyond), ', ')}: averages beyond the range of their dtype"] = None
    return list(notes)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
