"""The base model of adapters: its identity, its changes, and whether it can be recreated.

A base is recognised by sampled elements. Sampling detects another model, another precision, and
changes of most of a layer, such as a merged adapter; it misses changes of few elements, such as a
row of an embedding.
"""

import json
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any
from weakref import ref

import torch
import xxhash
from torch import nn

from ft_ckpt.checkpoint import BaseRecord, PartRecord
from ft_ckpt.errors import CheckpointError, SelectionError, listing
from ft_ckpt.formats import TensorFile, dtype_name
from ft_ckpt.messages import warn
from ft_ckpt.model.adapters import (
    TO_BASE,
    base_name,
    base_sources,
    has_adapters,
    is_peft_model,
    peft_name,
    stored_base_names,
)
from ft_ckpt.model.base_config import changes_of_config, class_of_base
from ft_ckpt.model.entries import Part
from ft_ckpt.model.libraries import PREFIX
from ft_ckpt.model.selection import module_at, view_of
from ft_ckpt.ranks import (
    ModelTensors,
    Ranks,
    Source,
    Values,
    elements_at,
    has_readable_elements,
    sample_elements,
    unwrap,
    walk_modules,
)

_PASSING = {
    "_name_or_path",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "architectures",
    "use_cache",
    "vocab_size",
}
# absent from the config in memory until diffusers writes it
_PASSING |= {"_diffusers_version", "_class_name"}
# Initialisations of LoRA that keep the base, and those that change it by a deterministic
# decomposition. All others (random, or computed from training data) cannot be repeated.
_KEEPS_BASE = frozenset({"true", "false", "none", "gaussian", "orthogonal", "eva", "mica"})
_REPEATS = frozenset({"pissa", "olora", "kasa", "loftq"})
_ULPS = 2  # tolerance in units of the coarser dtype, for a base loaded in another precision
# tolerance in units of float32, for decompositions and for adapters that were merged and unmerged
_REMADE_ULPS = 64


class BaseWatch:
    """Detects changes to the base of a run's adapters, because a resume starts from the unchanged
    base.
    """

    def __init__(self, attribute: str | None = None) -> None:
        """`attribute`: the submodule that has the adapters; None: the model itself."""
        self._attribute = attribute
        self._model: ref[nn.Module] | None = None
        self._samples: dict[str, dict[str, float]] = {}
        self._limits: dict[str, float] = {}  # relative tolerance by tensor name

    def note_base(self, model: nn.Module, rank: int) -> None:
        """Sample the base of `model`, unless it was the last one sampled."""
        if not self._knows_model(model):
            with suppress(CheckpointError):  # the model has no tensors yet
                self._samples = base_samples(model, rank, self._attribute)
                sources = ModelTensors(model).sources() if self._samples else {}
                dtypes = {source.name: source.dtype for source in sources.values()}
                remade = _REMADE_ULPS * torch.finfo(torch.float32).eps
                self._limits = {
                    name: max(_ULPS * torch.finfo(dtypes[name]).eps, remade)
                    for name in self._samples
                }
                self._model = ref(unwrap(model))

    def _knows_model(self, model: nn.Module) -> bool:
        return self._model is not None and self._model() is unwrap(model)

    def changed_layers(self, model: nn.Module, rank: int) -> list[str]:
        """Names of base tensors whose samples differ from those that `note_base` took of this
        model.
        """
        if not self._knows_model(model) or not self._samples:
            return []
        refuse_merged(unwrap(model))
        now, limits = base_samples(model, rank, self._attribute), self._limits
        return [
            name
            for name, values in self._samples.items()
            if name in now and not _are_near(now[name], values, limits[name], is_adapted=True)
        ]

    def refuse_changed(self, model: nn.Module, rank: int) -> None:
        """Raise SelectionError if the base has changed, because an adapter alone would lose the
        change.
        """
        if changed := self.changed_layers(model, rank):
            raise SelectionError(
                f"{_changed_text(changed)}: the adapter alone would lose it; save with "
                "adapter_only=False"
            )

    def is_left_out(self, model: nn.Module, alone: bool, asked: bool | None, ranks: Ranks) -> bool:
        """Whether a checkpoint of a run omits the base: `asked`, by default `alone`. Collective.

        `alone`: only adapters are trained. A base that has changed, as under ReLoRA, is saved with
        the adapters; raises SelectionError instead if `asked` is True.
        """
        if not (alone if asked is None else asked):
            return False
        found, error = ranks.attempt(lambda: self.changed_layers(model, ranks.rank))

        def all_changed(values: Values) -> list[str]:
            return sorted({name for value in values for name in value["changed"]})

        names = ranks.agree(
            "the base of save_state()", {"changed": found}, error, decide=all_changed
        ).result
        if not names:
            return True
        if asked:
            self.refuse_changed(model, ranks.rank)
            raise SelectionError(
                f"{_changed_text(names)} on other ranks; save with adapter_only=False"
            )
        if ranks.is_main:
            warn(f"{_changed_text(names)}: it is saved with the adapters", stacklevel=5)
        return False


def _changed_text(names: list[str]) -> str:
    return f"{listing(names, ', ')}: the adapters' base has changed since the run began"


def record_of_base(part: Part) -> BaseRecord:
    """The record of the base of an adapter's `part`, without its fingerprint.

    The id is None if built in memory.
    """
    module, adapter = part.module, str(part.adapter)
    model = module.get_base_model() if is_peft_model(module) else module
    settings, config = module.peft_config[adapter], getattr(model, "config", None)
    # the latter of diffusers
    origin = getattr(model, "name_or_path", None) or getattr(config, "_name_or_path", None)
    # diffusers keeps a Path as it is
    name = settings.base_model_name_or_path or (str(origin) if origin else None)
    revision = settings.revision or getattr(config, "_commit_hash", None)
    described = dict(config) if isinstance(config, Mapping) else {}
    if config is not None and hasattr(config, "to_dict"):
        described = config.to_dict()
    lasting = {key: value for key, value in described.items() if key not in _PASSING}
    digest = xxhash.xxh3_128_hexdigest(json.dumps(lasting, sort_keys=True, default=str).encode())
    dtype = common_dtype(identifying_tensors(part).values())
    return BaseRecord(
        name,
        revision,
        dtype,
        digest,
        {},
        class_of_base(model),
        changes_of_config(model, name, revision),
    )


def identifying_tensors(part: Part) -> dict[str, Source]:
    """The tensors of the base that identify it: those that the adapter does not store in their
    place.
    """
    replaced = {base_name(entry.name) for entry in part.entries}
    return {name: source for name, source in part.base.items() if name not in replaced}


def identifying_samples(record: PartRecord) -> dict[str, Mapping[str, float]]:
    """The recorded samples of the base without tensors that the adapter replaces, which earlier
    versions sampled.
    """
    replaced = stored_base_names(record)
    samples = {} if record.base is None else record.base.fingerprint
    return {name: values for name, values in samples.items() if name not in replaced}


def refuse_merged(module: nn.Module) -> None:
    """Raise SelectionError naming the layers that have an adapter merged into them.

    Their base weights contain the adapter and would be stored as those of the plain base.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    merged = [
        path
        for path, _, inner in walk_modules(module)
        if isinstance(inner, BaseTunerLayer) and inner.merged
    ]
    if merged:
        raise SelectionError(
            f"{listing(merged, ', ')}: an adapter is merged into {len(merged)} layer(s); call "
            "unmerge_adapter() before a save, or merge_and_unload() to save the merged model as one"
        )


def keeps_base(config: Any) -> bool:
    """Whether the initialisation of an adapter with this config leaves the base unchanged."""
    return not _changes_of_base(config)


def start_keeps_base(init_lora_weights: Any) -> bool:
    """Whether LoRA matrices that are initialised so leave the base unchanged; False for an unknown
    initialisation.
    """
    return str(init_lora_weights).lower() in _KEEPS_BASE


def _changes_of_base(config: Any) -> list[str]:
    """The initialisations in the config that change the base, in PEFT's order."""
    init = getattr(config, "init_lora_weights", True)
    found = [] if start_keeps_base(init) else [str(init)]
    return [*found, *(["kasa"] if getattr(config, "kasa_config", None) else [])]


def irreproducible(configs: Mapping[str, Any]) -> str:
    """Why the base of adapters with these configs cannot be recreated; "" if it can.

    LoftQ is repeatable in its first iteration only: later ones quantise the residual of a
    decomposition, whose last digits differ between machines.
    """
    wrong = []
    for name, config in configs.items():
        loftq = getattr(config, "loftq_config", None)
        is_long = isinstance(loftq, dict) and loftq.get("loftq_iter", 1) != 1
        changes = _changes_of_base(config)
        wrong += [
            f"{name} ({init})"
            for init in changes
            if init.lower() not in _REPEATS or (init == "loftq" and is_long)
        ]
    return (
        f"adapter {', '.join(wrong)}: its initialisation changed the base and cannot be repeated"
        if wrong
        else ""
    )


def base_samples(
    model: nn.Module, rank: int, attribute: str | None = None
) -> dict[str, dict[str, float]]:
    """A few local elements of frozen base tensors: of adapted layers, else of all; {} without
    adapters.
    """
    if not has_adapters(module_at(model, attribute or "")):
        return {}
    below = base_sources(view_of(model, ModelTensors(model).sources(), attribute or ""))
    base = {info.name: info for _, info in below if not info.trainable}
    adapted = {name: source for name, source in base.items() if set(TO_BASE) & set(name.split("."))}
    return sample_elements(adapted or base, rank, tensors=128, elements=4)


def differences_of_base(
    model: nn.Module,
    parts: Iterable[PartRecord],
    stored: Container[str],
    rank: int,
    attribute: str | None = None,
) -> tuple[int, list[str]]:
    """Compare the base of the adapters of `model`, or of its `attribute`, with the recorded
    samples.

    Tensors in `stored` are not compared. Returns the number of compared tensors and the
    differences.
    """
    module: Any = module_at(model, attribute or "")
    if not has_adapters(module):
        return 0, []
    here = dict(base_sources(view_of(model, ModelTensors(model).sources(), attribute or "")))
    left = {name: source for name, source in here.items() if source.name not in stored}
    is_remade = not all(keeps_base(config) for config in module.peft_config.values())
    compared, problems = 0, dict[str, None]()
    for record in parts:
        base = record.base
        outside = {
            n: v for n, v in identifying_samples(record).items() if n in left or n not in here
        }
        if base is None or not outside:
            continue
        compared += len(outside)
        if (dtype := common_dtype(left.values())) != base.dtype:
            problems[f"{dtype}, it was {base.dtype}"] = None
        outer = replace(record, base=replace(base, fingerprint=outside))
        if names := differing_tensors(left, outer, rank, is_remade=is_remade):
            problems[
                f"{listing(names, ', ')}: {len(names)} of {len(outside)} sampled tensors differ"
            ] = None
    return compared, list(problems)


def differing_tensors(
    here: Mapping[str, Source], record: PartRecord, rank: int = 0, *, is_remade: bool = False
) -> list[str]:
    """Names of recorded base tensors of an adapter that are missing `here`, or whose elements on
    this rank differ.

    `is_remade`: the initialisation of the adapter has changed both bases, so the last digits may
    differ.
    """
    if record.base is None:
        return []
    adapted, dtype = _adapted_paths(record), record.base.dtype

    def is_same(name: str, values: Mapping[str, float]) -> bool:
        source = here.get(name)
        if (
            source is None
            or not has_readable_elements(source)
            or any(int(index) >= source.numel for index in values)
        ):
            return False
        found = elements_at(source, rank, [int(index) for index in values])
        return _elements_agree(
            found, source.dtype, values, dtype, name.rpartition(".")[0] in adapted, is_remade
        )

    return [
        name for name, values in identifying_samples(record).items() if not is_same(name, values)
    ]


def differing_elements(file: TensorFile, record: PartRecord) -> tuple[int, list[str]]:
    """The number of compared tensors of an adapter's base, and the names of those whose elements in
    `file` differ.

    A few elements of each are read. Tensors that the file lacks, or has quantised, are left out.
    """
    if record.base is None:
        return 0, []
    compared, adapted, names, wrong = 0, _adapted_paths(record), file.ties, []
    for name, values in identifying_samples(record).items():
        stored = names.get(name, name)
        spec = file.specs.get(stored)
        if spec is None or not (dtype := getattr(torch, spec.dtype)).is_floating_point:
            continue
        indices = [int(index) for index in values]
        compared += 1
        found = {str(at): float(file.read(stored, at, at + 1)) for at in indices if at < spec.numel}
        is_adapted = name.rpartition(".")[0] in adapted
        if len(found) < len(indices) or not _elements_agree(
            found, dtype, values, record.base.dtype, is_adapted, False
        ):
            wrong.append(name)
    return compared, wrong


def _adapted_paths(record: PartRecord) -> frozenset[str]:
    """All prefixes of the paths of the adapter's tensors in the base model; they include the
    adapted layers.
    """
    names = (peft_name(tensor.name, tensor.file) for tensor in record.tensors)
    steps = (name.removeprefix(PREFIX).split(".") for name in names)
    return frozenset(".".join(one[:depth]) for one in steps for depth in range(1, len(one)))


def common_dtype(tensors: Iterable[Source]) -> str:
    """The most common dtype of the floating-point tensors; "float32" if there are none."""
    dtypes = [source.dtype for source in tensors if source.dtype.is_floating_point]
    common = max(set(dtypes), key=dtypes.count, default=None)
    return dtype_name(common) if common else "float32"


def _elements_agree(
    here: Mapping[str, float],
    here_dtype: torch.dtype,
    values: Mapping[str, float],
    dtype: str,
    is_adapted: bool,
    is_remade: bool,
) -> bool:
    """Whether elements equal the recorded `values`, of type `dtype`, within the precision of the
    coarser dtype.

    Equal dtypes are compared exactly, except in adapted layers: merging and unmerging changes the
    last digits.
    """
    recorded = getattr(torch, dtype, torch.float32)
    coarse = max((recorded, here_dtype), key=lambda kind: torch.finfo(kind).eps)
    limit = 0.0 if here_dtype == recorded and not is_adapted else _ULPS * torch.finfo(coarse).eps
    if is_adapted and is_remade:
        limit = max(limit, _REMADE_ULPS * torch.finfo(torch.float32).eps)
    return _are_near(here, values, limit, is_adapted)


def _are_near(
    here: Mapping[str, float], values: Mapping[str, float], limit: float, is_adapted: bool
) -> bool:
    """Whether elements differ by at most `limit` times their size; in an adapted layer, at least
    1/4 of the largest.
    """
    least = max(map(abs, values.values()), default=0.0) / 4 if is_adapted else 1e-6
    return all(
        value == values[index]
        or abs(value - values[index]) <= limit * max(abs(values[index]), least)
        for index, value in here.items()
    )
