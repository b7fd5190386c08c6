"""The average of several checkpoints, weighted or plain, slice by slice: nothing but a few slices is held.

Elements are added up in float32 (float64 ones in float64) and rounded once. Source: Wortsman et al., "Model soups",
2022, arXiv:2203.05482; Izmailov et al., "Averaging weights leads to wider optima", 2018, arXiv:1803.05407.
"""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from datetime import datetime, timezone
from functools import reduce
from operator import and_
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from ft_ckpt.checkpoint import catalog
from ft_ckpt.checkpoint.catalog import discover
from ft_ckpt.checkpoint.manifest import Manifest
from ft_ckpt.checkpoint.open_checkpoint import hold_open
from ft_ckpt.errors import ConfigError, CorruptError, LoadError, SelectionError, damaged_input, listing
from ft_ckpt.files.convert import ConvertReport, open_source, write_converted
from ft_ckpt.files.convert_options import ConvertOptions, check_apart, convert_options
from ft_ckpt.files.folder import FolderPart, WeightsFolder
from ft_ckpt.files.rename import FLOAT_DTYPES, copy_differences
from ft_ckpt.formats.dtypes import dtype_of
from ft_ckpt.formats.layout import Spec, TensorFile
from ft_ckpt.storage.place import Place, open_place, source_access
from ft_ckpt.storage.store import Store, read_text

# What an adapter's configuration says of the shape of its product; other fields (paths, dropout) may differ.
_ADAPTER_FIELDS = (
    *("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "alpha", "bias"),
    *("target_modules", "modules_to_save", "layers_to_transform", "fan_in_fan_out"),
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
    """Write the average of the checkpoints `sources` to `dst`, a folder or file; all or nothing, durably.

    `sources` are two or more checkpoints, folders or files of the same tensors; or one run's folder with `last`:
    that many of its newest valid checkpoints. `weights`: a number for each source, else all count alike; their sum
    is made 1. Floating-point tensors are averaged in float32 and rounded once to their type, or to `dtype`. Tensors of
    other types must be equal in all sources, else the last source's is taken and the report names it. The companions
    (config, tokenizer) are the last source's; a state of training is not averaged. Adapters are averaged factor by
    factor, and must be of one base and configuration. The manifest says what the average was made from: `latest` and
    `best` pass it over, and no rule of a run deletes it. Sources are compared with their digests while they are read.
    Further arguments are those of `convert`.

    Raises ConfigError for counts and weights that cannot be, SelectionError naming tensors that differ in name, shape
    or type, LoadError for adapters of different bases; for files as `convert` does.
    """
    places = _chosen_places([open_place(source) for source in sources], last)
    shares = normalized_weights(weights, len(places))
    options = convert_options(
        dst, format=format, dtype=dtype, max_shard_size=max_shard_size, verify=verify, progress=progress,
        note=_average_note(places, shares, weights is None), made_from=tuple(place.last_step for place in places),
        overwrite=overwrite,
    )  # fmt: skip
    check_apart(places, options)
    with ExitStack() as stack:
        held = [stack.enter_context(hold_open(place)) for place in places]
        opened = [stack.enter_context(closing(open_source(*pair))) for pair in zip(held, places, strict=True)]
        access = reduce(and_, (source_access(*pair, options.target) for pair in zip(held, places, strict=True)))
        options = dataclasses.replace(options, access=access)
        averaged = _averaged_source(opened, shares, options)
        report = write_converted(averaged, held[-1], options)
    unequal = sorted(name for file in _averaged_files(averaged) for name in file.unequal)
    note = f"{listing(unequal, ', ')}: no floating-point numbers, and not equal; the last source's were taken"
    return dataclasses.replace(report, notes=(*report.notes, note)) if unequal else report


def normalized_weights(weights: Sequence[float] | None, count: int) -> list[float]:
    """Weights that add up to 1. Raises ConfigError unless there is a finite number for each, of a sum that is not 0."""
    if count < 2:
        raise ConfigError(
            f"{_counted(count, 'source')} given: an average is of two or more; give more, or last= and a run"
        )
    given = [1.0] * count if weights is None else [float(weight) for weight in weights]
    if len(given) != count or not all(map(math.isfinite, [*given, sum(given)])) or not sum(given):
        raise ConfigError(f"weights={list(weights or ())}: expected {count} finite numbers whose sum is not 0")
    return [weight / sum(given) for weight in given]


def parse_weights(text: str | None) -> list[float] | None:
    """Numbers with commas between them. Raises ConfigError for anything else."""
    try:
        return None if text is None else [float(number) for number in text.split(",")]
    except ValueError:
        raise ConfigError(f"weights={text!r}: expected numbers with commas between them, as in '1,2,1'") from None


class AveragedFile:
    """Files of the same tensors as one file of their averages; `unequal` gathers names of others that differ.

    Averages are of the type of what they are made from, or of `dtype`; `casts` says how many changed theirs.
    """

    def __init__(
        self, files: Sequence[TensorFile], shares: Sequence[float], names: Sequence[str], dtype: str | None = None
    ) -> None:
        differ = {name: copy_differences(files[0], file) for name, file in zip(names[1:], files[1:], strict=True)}
        wrong = [f"{name}: {what}" for name, found in differ.items() for what in found]
        if wrong:
            raise SelectionError(f"{listing(wrong)}: not as in {names[0]}; average checkpoints of one model")
        self.files, self.shares = list(files), list(shares)
        self.specs: Mapping[str, Spec] = {
            name: Spec(name, spec.shape, dtype if dtype and spec.dtype in FLOAT_DTYPES else spec.dtype)
            for name, spec in files[0].specs.items()
        }
        casts = (f"{spec.dtype}->{self.specs[name].dtype}" for name, spec in files[0].specs.items())
        self.casts = dict(Counter(cast for cast in casts if len(set(cast.split("->"))) > 1))
        self.ties: dict[str, str] = dict(getattr(files[0], "ties", {}))
        self.metadata: dict[str, str] = dict(getattr(files[0], "metadata", {}))
        self.skipped: tuple[str, ...] = tuple(getattr(files[0], "skipped", ()))
        self.unequal: set[str] = set()

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Flat elements [start, stop) of the average of tensor `name`: 1-D, on the CPU, in the type its spec says."""
        parts = (file.read(name, start, stop) for file in self.files)
        first = next(parts)
        if not (first.is_floating_point() or first.is_complex()):
            return self._last_of(name, first, parts)
        wide = torch.promote_types(first.dtype, torch.float32)
        total = first.to(wide) * self.shares[0]
        for share, part in zip(self.shares[1:], parts, strict=True):
            total.add_(part.to(wide), alpha=share)
        return total.to(dtype_of(self.specs[name].dtype))

    def _last_of(self, name: str, first: Tensor, parts: Any) -> Tensor:
        found = first
        for part in parts:
            if not torch.equal(part, found):
                self.unequal.add(name)
            found = part
        return found

    def close(self) -> None:
        """Nothing: whoever opened the files closes them."""


def _chosen_places(sources: list[Place], last: int | None) -> list[Place]:
    if last is None:
        return sources
    if len(sources) != 1 or last < 2:
        found = _counted(len(sources), "source")
        raise ConfigError(f"last={last} with {found}: expected one run's folder, and 2 or more")
    known = [info for info in discover(sources[0]) if not info.manifest.made_from]
    if not known:
        raise ConfigError(
            f"{sources[0]}: no checkpoints of a run in it, {last} are wanted; give the folder that a run saves to, or "
            "the checkpoints themselves without last="
        )
    of_run = [info for info in known if info.manifest.run_id == known[-1].manifest.run_id]
    # The weights that a run ends with are those of its last checkpoint once more: they do not count twice.
    moments = [info for info in of_run if not info.manifest.export] or of_run
    places = [info.place for info in reversed(moments)]
    whole = [place for place in places if catalog.verify(place, deep=False).ok][:last]
    if len(whole) < last:
        found = _counted(len(whole), "valid checkpoint")
        raise ConfigError(f"{sources[0]}: {found} of its newest run, {last} are wanted; give a smaller last=")
    return whole[::-1]


def _averaged_source(opened: Sequence[TensorFile], shares: Sequence[float], options: ConvertOptions) -> TensorFile:
    """One source for a conversion: of folders a folder with the same parts, else a file."""
    names = options.made_from
    folders = [one for one in opened if isinstance(one, WeightsFolder)]
    if len(folders) < len(opened):
        return AveragedFile(opened, shares, names, options.dtype)
    kinds = [[(part.path, part.kind) for part in folder.parts] for folder in folders]
    if odd := [name for name, found in zip(names, kinds, strict=True) if found != kinds[0]]:
        raise SelectionError(f"{listing(odd)}: other parts than {names[0]}; average checkpoints of one model")
    _check_adapters(folders, names)
    last = folders[-1]
    parts = []
    for at, part in enumerate(last.parts):
        same = [folder.parts[at].file for folder in folders]
        parts.append(dataclasses.replace(part, file=AveragedFile(same, shares, names, options.dtype)))
    return WeightsFolder(last.place, last.origin, parts, _averaged_manifest(last.manifest, names))


def _averaged_files(source: TensorFile) -> list["AveragedFile"]:
    parts = [part.file for part in source.parts] if isinstance(source, WeightsFolder) else [source]
    return [file for file in parts if isinstance(file, AveragedFile)]


def _averaged_manifest(last: Manifest | None, names: Sequence[str]) -> Manifest | None:
    """The last source's, without what it says of one moment of a run."""
    if last is None:
        return None
    created = datetime.now(timezone.utc).isoformat()
    return dataclasses.replace(
        last, created=created, step=None, metrics={}, rankings={}, run_id=None, number=None, notes=(),
        export=True, made_from=tuple(names),
    )  # fmt: skip


def _check_adapters(folders: Sequence[WeightsFolder], names: Sequence[str]) -> None:
    """Raise LoadError where adapters are on another base, or are multiplied otherwise, than the first source's."""
    facts = [
        {part.path: _adapter_facts(folder, part) for part in folder.parts if part.kind == "adapter"}
        for folder in folders
    ]
    wrong = [
        f"{name}: {key} is {found[path].get(key)!r}, {facts[0][path].get(key)!r} in {names[0]}"
        for name, found in zip(names[1:], facts[1:], strict=True)
        for path in found
        for key in sorted(found[path].keys() | facts[0][path].keys())
        if found[path].get(key) != facts[0][path].get(key)
    ]
    if wrong:
        raise LoadError(f"{listing(wrong)}; only adapters of one base and configuration have an average")


def _adapter_facts(folder: WeightsFolder, part: FolderPart) -> dict[str, Any]:
    config = _adapter_config_of(folder.store, f"{part.path}/adapter_config.json".lstrip("/"))
    facts = {key: _comparable(config.get(key)) for key in _ADAPTER_FIELDS}
    base = part.record.base if part.record is not None else None
    named = config.get("base_model_name_or_path")
    # Sampled elements tell bases apart that go by one name, and equal ones by two; as a digest, to be put into words.
    facts["base"] = named if base is None else f"one of samples {_short_digest(base.fingerprint)}"
    return facts


def _adapter_config_of(store: Store, name: str) -> dict[str, Any]:
    """The settings of an adapter. Raises MissingError where there are none, CorruptError for what is no JSON object."""
    with damaged_input(store.where(name)):
        found = json.loads(read_text(store, name))
    if not isinstance(found, dict):
        raise CorruptError(f"{store.where(name)}: no settings of an adapter; use another copy")
    return found


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _short_digest(value: object) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(value, sort_keys=True).encode())


def _comparable(value: Any) -> Any:
    return sorted(map(str, value)) if isinstance(value, list) else value  # PEFT writes sets in any order


def _average_note(places: Sequence[Place], shares: Sequence[float], plain: bool) -> str:
    named = zip((place.last_step for place in places), shares, strict=True)
    return f"the average of {', '.join(name if plain else f'{name} ({share:.4g})' for name, share in named)}"
