"""Averages checkpoints, weighted or not, slice by slice.

Elements are summed in float32 (float64 ones in float64) and rounded once. Source: Wortsman et al.,
"Model soups", 2022, arXiv:2203.05482; Izmailov et al., "Averaging weights leads to wider optima",
2018, arXiv:1803.05407.
"""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from datetime import datetime, timezone
from functools import reduce
from itertools import chain
from operator import and_
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from ft_ckpt.checkpoint import Manifest, damage_of, hold_open, list_readable
from ft_ckpt.errors import ConfigError, LoadError, SelectionError, listing
from ft_ckpt.extensions.tools.converting import (
    FLOAT_DTYPES,
    ConvertOptions,
    ConvertReport,
    check_apart,
    convert_options,
    open_source,
    spec_differences,
    write_converted,
)
from ft_ckpt.formats import TensorFile, dtype_of, is_within
from ft_ckpt.model import (
    WeightsFolder,
    adapter_settings,
    differing_class,
    differing_settings,
    finite_numbers,
    is_irreproducible,
    quantisation_of,
)
from ft_ckpt.storage import Place, open_place

_NO_MEAN = (  # powers of two, used as scales; two numbers per byte; complex numbers
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
    "complex32",
    "complex64",
    "complex128",
)


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
    """Write the average of the checkpoints `sources` to `dst`, a folder or file; all or nothing,
    durably.

    `sources` are two or more checkpoints, folders or files of the same tensors; or one run's folder
    with `last`, the number of its newest valid checkpoints to average. `weights`: a number for each
    source, normalised to a sum of 1; by default all are equal. Further arguments are those of
    `convert`.

    Floating-point tensors are averaged in float32 (float64 ones in float64) and rounded once to
    their dtype, or to `dtype`. Other tensors should be equal in all sources; otherwise the last
    source's is taken and the report names it. Differing indices of an adapter and complex numbers
    are refused. Sources store the same names, shapes and types, and agree on ties. Sidecar files
    (config, tokenizer) are the last source's. Folders are refused if settings that change the
    output differ, if their tokenizers map one id to different tokens, or if they are quantised.
    Training state is not averaged. Adapters are averaged factor by factor and must have the same
    base. The manifest names the sources; `latest` and `best` skip an average, and a run's retention
    rules never delete it. Sources are compared with their digests before they are read.

    Raises ConfigError for invalid counts and weights, SelectionError naming tensors that differ in
    name, shape, type or ties, or have no mean, LoadError naming settings and bases that differ; for
    files as `convert` does.
    """
    places = _chosen_places([open_place(source) for source in sources], last)
    shares = normalized_weights(weights, len(places))
    named = zip((place.basename for place in places), shares, strict=True)
    terms = [name if weights is None else f"{name} ({share:.4g})" for name, share in named]
    options = convert_options(
        dst,
        format=format,
        dtype=dtype,
        max_shard_size=max_shard_size,
        verify=verify,
        progress=progress,
        note=f"the average of {', '.join(terms)}",
        made_from=tuple(place.basename for place in places),
        overwrite=overwrite,
    )
    check_apart(places, options)
    with ExitStack() as stack:
        held = [stack.enter_context(hold_open(place)) for place in places]
        opened = [stack.enter_context(closing(open_source(place))) for place in held]
        modes = [place.mode_at(options.target) for place in held]
        options = dataclasses.replace(options, max_mode=reduce(and_, modes))
        averaged = _averaged_source(opened, shares, options)
        report = write_converted(averaged, held[-1], options)
    return dataclasses.replace(report, notes=(*report.notes, *_notes_of(averaged)))


def normalized_weights(weights: Sequence[float] | None, count: int) -> list[float]:
    """The weights, scaled to sum 1.

    Raises ConfigError unless they are `count` finite numbers whose sum is not 0.
    """
    if count < 2:
        raise ConfigError(
            f"{_counted(count, 'source')} given, expected two or more; or give a run with last="
        )
    given = [1.0] * count if weights is None else finite_numbers(weights)
    total = sum(given)
    shares = [weight / total for weight in given] if total else []
    if len(shares) != count or not all(map(math.isfinite, [*shares, total])):
        raise ConfigError(
            f"weights={weights!r}: expected {count} finite numbers whose sum is not 0"
        )
    return shares


def parse_weights(text: str | None) -> list[float] | None:
    """Parse numbers separated by commas. Raises ConfigError for other text."""
    try:
        return None if text is None else [float(number) for number in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"weights={text!r}: expected numbers separated by commas, as in '1,2,1'"
        ) from None


class AveragedFile:
    """The averages of several files with the same tensors, as one file.

    All files store the same names, shapes and dtypes, and agree on ties. Averages have the dtype of
    the sources, or `dtype`; `casts` counts the changes of dtype. After reading, `unequal` names the
    non-floating tensors that differ (an error for adapters, where they are indices), `beyond` the
    tensors whose averages exceed the range of their dtype.
    """

    def __init__(
        self,
        files: Sequence[TensorFile],
        shares: Sequence[float],
        names: Sequence[str],
        dtype: str | None = None,
        *,
        is_adapter: bool = False,
    ) -> None:
        _refuse_other_tensors(files, names)
        self.ties, self.notes = _common_ties(files, names)
        self.files, self.shares, self.is_adapter = list(files), list(shares), is_adapter
        last = files[-1].specs
        self.specs = dict(last)
        for name, spec in last.items():
            if dtype is not None and spec.dtype in FLOAT_DTYPES:
                self.specs[name] = spec._replace(dtype=dtype)
        changed = [(spec.dtype, self.specs[name].dtype) for name, spec in last.items()]
        self.casts = dict(
            Counter(f"{before}->{after}" for before, after in changed if before != after)
        )
        self.metadata: dict[str, str] = dict(getattr(files[-1], "metadata", {}))
        self.skipped = tuple(
            dict.fromkeys(what for file in files for what in getattr(file, "skipped", ()))
        )
        self.unequal: set[str] = set()
        self.beyond: set[str] = set()

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Flat elements [start, stop) of the average of tensor `name`: 1-D, on the CPU, in the
        dtype of its spec.
        """
        parts = (file.read(name, start, stop) for file in self.files)
        first = next(parts)
        if not first.is_floating_point():
            return self._last_of(name, first, parts)
        wide = torch.float64 if first.dtype == torch.float64 else torch.float32
        total = torch.zeros_like(first, dtype=wide)
        for share, part in zip(self.shares, chain([first], parts), strict=True):
            if share:  # NaN times 0 is NaN
                total.add_(part.to(wide), alpha=share)
        dtype = dtype_of(self.specs[name].dtype)
        if not is_within(total, dtype) and bool((total.abs() > torch.finfo(dtype).max).any()):
            self.beyond.add(name)
        return total.to(dtype)

    def _last_of(self, name: str, first: Tensor, parts: Iterator[Tensor]) -> Tensor:
        found = first
        for part in parts:
            if not torch.equal(part, found):
                self.unequal.add(name)
            found = part
        # one element is a counter
        if self.is_adapter and name in self.unequal and self.specs[name].numel > 1:
            raise SelectionError(
                f"{name}: indices that differ between the sources; their values have no average"
            )
        return found

    def close(self) -> None:
        """Leave the files open: the caller closes them."""


def _refuse_other_tensors(files: Sequence[TensorFile], names: Sequence[str]) -> None:
    """Raise SelectionError naming stored tensors that are not as in the first file, or whose dtype
    has no mean.
    """
    specs = [
        {name: (spec.shape, spec.dtype) for name, spec in file.specs.items()} for file in files
    ]
    problems: list[str] = []
    for source, stored in zip(names, specs, strict=True):
        problems += [f"{source}: {difference}" for difference in spec_differences(specs[0], stored)]
    if problems:
        raise SelectionError(
            f"{listing(problems)}: not as in {names[0]}; average checkpoints of one model"
        )
    without_mean = [
        f"{name}: {dtype}" for name, (_, dtype) in specs[0].items() if dtype in _NO_MEAN
    ]
    if without_mean:
        raise SelectionError(
            f"{listing(without_mean)}: no mean of this dtype; convert the models first"
        )


def _common_ties(
    files: Sequence[TensorFile], names: Sequence[str]
) -> tuple[dict[str, str], list[str]]:
    """The stored tensor of each tied name, and notes on files that do not record one, as those of
    transformers.

    Raises SelectionError for names that are tied to other tensors in other files.
    """
    recorded = [getattr(file, "ties", {}) for file in files]
    ties: dict[str, str] = {}
    problems: list[str] = []
    for source, ties_of_file in zip(names, recorded, strict=True):
        for name, stored in ties_of_file.items():
            first = ties.setdefault(name, stored)
            if first != stored:
                problems.append(f"{source}: {name}: tied to {stored}, expected {first}")
    if problems:
        raise SelectionError(
            f"{listing(problems)}: not as in other sources; average checkpoints of one model"
        )
    notes = []
    for name, stored in ties.items():
        for source, ties_of_file in zip(names, recorded, strict=True):
            if name not in ties_of_file:
                notes.append(
                    f"{name}: not in {source}; taken to be tied to {stored}, as "
                    "in the other sources"
                )
    return ties, notes


def _chosen_places(sources: list[Place], last: int | None) -> list[Place]:
    if last is None:
        return sources
    if len(sources) != 1 or type(last) is not int or last < 2:
        found = _counted(len(sources), "source")
        raise ConfigError(f"last={last!r} with {found}: expected one run's folder, and 2 or more")
    known = [info for info in list_readable(sources[0]).found if not info.manifest.made_from]
    if not known:
        raise ConfigError(
            f"{sources[0]}: no checkpoints of a run in it, {last} are wanted; give the folder that "
            "a run saves to, or the checkpoints themselves without last="
        )
    of_run = [info for info in known if info.manifest.run_id == known[-1].manifest.run_id]
    # The final export of a run repeats the weights of its last checkpoint, which must not count
    # twice.
    moments = [info for info in of_run if not info.manifest.export] or of_run
    places = [info.place for info in reversed(moments)]
    whole: list[Place] = []
    for place in places:
        if len(whole) == last:
            break
        whole += [] if damage_of(place) else [place]
    if len(whole) < last:
        found = _counted(len(whole), "valid checkpoint")
        raise ConfigError(
            f"{sources[0]}: {found} of its newest run, {last} are wanted; give a smaller last="
        )
    return whole[::-1]


def _averaged_source(
    opened: Sequence[TensorFile], shares: Sequence[float], options: ConvertOptions
) -> TensorFile:
    """The averages as one source for a conversion: a folder with the same parts if all are folders,
    else a file.
    """
    names = options.made_from
    folders = [one for one in opened if isinstance(one, WeightsFolder)]
    stores = [
        (Path(name, part.path), Place(one.store, part.path).folder)
        for name, one in zip(names, opened, strict=True)
        if isinstance(one, WeightsFolder)
        for part in one.parts
    ]
    if quantised := [
        f"{name}: {field}" for name, store in stores if (field := quantisation_of(store))
    ]:
        raise SelectionError(
            f"{listing(quantised)}: quantised weights have no average; dequantise the models first"
        )
    if len(folders) < len(opened):
        return AveragedFile(opened, shares, names, options.dtype)
    kinds = [[(part.path, part.kind) for part in folder.parts] for folder in folders]
    if differing := [name for name, found in zip(names, kinds, strict=True) if found != kinds[0]]:
        raise SelectionError(
            f"{listing(differing)}: other parts than {names[0]}; average checkpoints of one model"
        )
    last, parts, wrong = folders[-1], [], _differing_shares(folders, names)
    for at, part in enumerate(last.parts):
        is_adapter = part.kind == "adapter"
        same = [folder.parts[at].file for folder in folders]
        file = AveragedFile(same, shares, names, options.dtype, is_adapter=is_adapter)
        wrong += _differing_settings(folders, at, names)
        if is_adapter:
            unfit, notes = _differing_bases(folders, at, names)
            wrong, file.notes = wrong + unfit, file.notes + notes
        parts.append(dataclasses.replace(part, file=file))
    if wrong:
        raise LoadError(
            f"{listing(wrong)}; only models of one config, or adapters of one base, have an average"
        )
    return WeightsFolder(last.place, parts, _averaged_manifest(last.manifest, names))


def _notes_of(source: TensorFile) -> Iterator[str]:
    """Notes for the report; complete only after the tensors were read."""
    parts = [part.file for part in source.parts] if isinstance(source, WeightsFolder) else [source]
    files = [file for file in parts if isinstance(file, AveragedFile)]
    yield from dict.fromkeys(note for file in files for note in file.notes)
    if unequal := sorted(name for file in files for name in file.unequal):
        yield (
            f"{listing(unequal, ', ')}: no floating-point numbers, and not equal; the last "
            "source's were taken"
        )
    if beyond := sorted(name for file in files for name in file.beyond):
        yield f"{listing(beyond, ', ')}: averages beyond the range of their dtype"


def _averaged_manifest(last: Manifest | None, names: Sequence[str]) -> Manifest | None:
    """The last source's manifest without the fields about one step of a run."""
    if last is None:
        return None
    created = datetime.now(timezone.utc).isoformat()
    return dataclasses.replace(
        last,
        created=created,
        step=None,
        metrics={},
        rankings={},
        run_id=None,
        number=None,
        notes=(),
        export=True,
        made_from=tuple(names),
    )


def _differing_shares(folders: Sequence[WeightsFolder], names: Sequence[str]) -> list[str]:
    """Sources in which parts share other tensors than in the first source."""
    known = [folder.manifest.shared if folder.manifest is not None else () for folder in folders]
    shared = [{frozenset(group) for group in groups} for groups in known]
    return [
        f"{name}: its parts share other tensors"
        for name, found in zip(names, shared, strict=True)
        if found != shared[0]
    ]


def _differing_settings(
    folders: Sequence[WeightsFolder], at: int, names: Sequence[str]
) -> list[str]:
    """Settings of part `at` that differ from the first source's and change the output."""
    first = folders[0].parts[at]
    first_store = Place(folders[0].store, first.path).folder
    problems = []
    for name, folder in zip(names[1:], folders[1:], strict=True):
        store = Place(folder.store, first.path).folder
        differences = differing_class(first, folder.parts[at])
        differences += differing_settings(first_store, store, first.kind)
        for field, expected, value in differences:
            problems.append(
                f"{Path(name, first.path)}: {field} is {value}, {expected} in {names[0]}"
            )
    return problems


def _differing_bases(
    folders: Sequence[WeightsFolder], at: int, names: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Sources whose adapter in part `at` has another base than the first source's, or one that is
    lost; and notes.

    Bases are compared by their sampled elements if all sources have them, else by name and
    revision.
    """
    facts, wrong = [], []
    records = [folder.parts[at].record for folder in folders]
    bases = [record.base if record is not None else None for record in records]
    are_sampled = all(base is not None and base.fingerprint for base in bases)
    for name, folder, base in zip(names, folders, bases, strict=True):
        settings = adapter_settings(Place(folder.store, folder.parts[at].path).folder)
        if is_irreproducible(settings) and all(part.kind == "adapter" for part in folder.parts):
            wrong.append(
                f"{name}: its initialisation changed the base, which cannot be "
                "repeated and is not stored"
            )
        if base is not None and are_sampled:
            samples = json.dumps(base.fingerprint, sort_keys=True).encode()
            facts.append(f"one with samples {xxhash.xxh3_64_hexdigest(samples)}")
        else:
            named = (
                (base.id if base is not None else None)
                or settings.get("base_model_name_or_path")
                or "not named"
            )
            revision = (
                (base.revision if base is not None else None) or settings.get("revision") or "main"
            )
            facts.append(f"{named} (revision {revision})")
    others = zip(names[1:], facts[1:], strict=True)
    wrong += [
        f"{name}: base is {fact}, {facts[0]} in {names[0]}"
        for name, fact in others
        if fact != facts[0]
    ]
    unnamed = facts[0].startswith("not named")
    return wrong, ["the adapters do not name their base; it was not compared"] if unnamed else []


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
