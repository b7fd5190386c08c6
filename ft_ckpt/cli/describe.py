"""Describes a stored model: class, number of parameters, adapter and base.

The description comes from manifests and configs. Neither tensors nor torch are needed.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ft_ckpt.checkpoint.catalog import CheckpointInfo
from ft_ckpt.checkpoint.commit import STATE
from ft_ckpt.checkpoint.manifest import PartRecord, class_in, document_in
from ft_ckpt.errors import CheckpointError, listing
from ft_ckpt.retention import Keep, keep_from_record
from ft_ckpt.storage import Store

# a larger JSON document of a training state is not read
_MAX_DOCUMENT_BYTES = 64 << 20
# fields of a config of transformers, and how they are printed
_SIZES = {
    "num_hidden_layers": "{:,} layers",
    "hidden_size": "hidden size {:,}",
    "vocab_size": "{:,} tokens",
}
_ADAPTER_NAMES = {"LORA": "LoRA", "ADALORA": "AdaLoRA", "LOHA": "LoHa", "LOKR": "LoKr"}
_MAX_TARGETS = 8


@dataclass(frozen=True)
class ModelFacts:
    """A description of a stored model or adapter. What is unknown is None or empty.

    Attributes:
        class_name: The name of the model's class.
        parameters: The number of stored elements, without the training state. Tied tensors count
            once.
        dtypes: The dtypes, beginning with that of most elements.
        model_type: The type of the architecture, such as "llama".
        sizes: The numbers of layers, hidden units and tokens, by the fields of the config.
        quantisation: The method by which the weights are quantised.
        adapter: The kind of adapter, such as "LoRA"; None for a model.
        rank: The rank of a LoRA adapter.
        alpha: The alpha of a LoRA adapter.
        targets: The modules that have adapters.
        base: The name or path of the adapter's base model.
    """

    class_name: str | None
    parameters: int
    dtypes: tuple[str, ...]
    model_type: str | None = None
    sizes: Mapping[str, int] | None = None
    quantisation: str | None = None
    adapter: str | None = None
    rank: int | None = None
    alpha: float | None = None
    targets: tuple[str, ...] = ()
    base: str | None = None

    def headline(self) -> str:
        """Return a line such as "LoRA adapter of LlamaForCausalLM, 4,096 parameters in float32"."""
        subject = self.class_name or ""
        if self.adapter is not None:
            subject = f"{self.adapter} adapter"
            if self.class_name:
                subject += f" of {self.class_name}"
        unit = "parameters" if self.quantisation is None else "stored elements"
        size = f"{human_count(self.parameters)} {unit}"
        if self.dtypes:
            size += f" in {' and '.join(self.dtypes)}"
        return f"{subject}, {size}" if subject else size

    def details(self) -> Iterator[str]:
        """Yield a line each for the architecture, the quantisation, the adapter and its base."""
        architecture = [self.model_type] if self.model_type else []
        for field, size in (self.sizes or {}).items():
            architecture.append(_SIZES[field].format(size))
        if architecture:
            yield ", ".join(architecture)
        if self.quantisation is not None:
            yield f"quantised by {self.quantisation}"
        if self.rank is not None:
            line = f"rank {self.rank}"
            if self.alpha is not None:
                line += f", alpha {self.alpha:g}"
            if self.targets:
                line += f", on {listing(self.targets, ', ', _MAX_TARGETS)}"
            yield line

        if self.adapter is not None:
            yield f"base: {self.base or 'a model built in memory'}"


def human_count(count: int) -> str:
    """Format a number of elements, as in "1.24 B", "7.50 M" or "4,096"."""
    for unit, size in (("B", 10**9), ("M", 10**6)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:,}"


def facts_of_part(store: Store, part: PartRecord) -> ModelFacts:
    """Return the facts about a model or adapter of a checkpoint in `store`."""
    elements = Counter[str]()
    for tensor in part.tensors:
        elements[tensor.dtype] += math.prod(tensor.shape)
    folder = f"{part.path}/" if part.path else ""
    is_adapter = part.kind == "adapter"
    base = part.base
    class_name = part.class_name
    if is_adapter:
        class_name = "" if base is None else base.class_name
    base_id = None if base is None else base.id
    return _facts(store, folder, elements, class_name, base_id, is_adapter=is_adapter)


def facts_of_folder(store: Store, tensors: Iterable[tuple[str, Sequence[int]]]) -> ModelFacts:
    """Describe the model in a folder that another program wrote.

    `tensors` has the dtype and shape of each tensor.
    """
    elements = Counter[str]()
    for dtype, shape in tensors:
        elements[dtype] += math.prod(shape)
    is_adapter = store.stat("adapter_config.json") is not None
    return _facts(store, "", elements, "", None, is_adapter=is_adapter)


def adapter_name(store: Store, part: PartRecord) -> str:
    """Return the kind of an adapter, as in "LoRA", or "adapter" if its config does not name it."""
    return _adapter_name(document_in(store, f"{part.path}/adapter_config.json".removeprefix("/")))


def _adapter_name(config: Mapping[str, Any]) -> str:
    kind = config.get("peft_type")
    if not isinstance(kind, str):
        return "adapter"
    if config.get("use_dora") is True:
        return "DoRA"
    return _ADAPTER_NAMES.get(kind, kind)


def _facts(
    store: Store,
    folder: str,
    elements: Counter[str],
    class_name: str,
    base: str | None,
    *,
    is_adapter: bool,
) -> ModelFacts:
    facts = ModelFacts(
        class_name=class_name or None,
        parameters=elements.total(),
        dtypes=tuple(dtype for dtype, _ in elements.most_common()),
    )
    if is_adapter:
        config = document_in(store, f"{folder}adapter_config.json")
        return _with_adapter_config(facts, config, base)
    config = document_in(store, f"{folder}config.json")
    return _with_model_config(facts, config)


def _with_adapter_config(
    facts: ModelFacts, config: Mapping[str, Any], base: str | None
) -> ModelFacts:
    return replace(
        facts,
        adapter=_adapter_name(config),
        rank=_whole(config.get("r")),
        alpha=_number(config.get("lora_alpha")),
        targets=_targets(config),
        base=base or _text(config.get("base_model_name_or_path")) or None,
    )


def _with_model_config(facts: ModelFacts, config: Mapping[str, Any]) -> ModelFacts:
    sized = config
    if isinstance(config.get("text_config"), dict):
        sized = {**config["text_config"], **config}
    sizes = {field: sized[field] for field in _SIZES if type(sized.get(field)) is int}
    quantisation = config.get("quantization_config")
    if not isinstance(quantisation, dict):
        quantisation = {}
    return replace(
        facts,
        class_name=facts.class_name or class_in(config, "") or None,
        model_type=_text(config.get("model_type")),
        sizes=sizes,
        quantisation=_text(quantisation.get("quant_method")),
    )


def _targets(config: Mapping[str, Any]) -> tuple[str, ...]:
    targets = config.get("target_modules")
    if isinstance(targets, str):
        return (targets,)
    if not isinstance(targets, list):
        return ()
    return tuple(sorted(name for name in targets if isinstance(name, str)))


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _whole(value: object) -> int | None:
    return value if type(value) is int else None


def _number(value: object) -> float | None:
    return value if type(value) in (int, float) else None  # type: ignore[return-value]  # as just compared


def rules_of_run(infos: Sequence[CheckpointInfo]) -> Keep | None:
    """Return the rules of the run in its newest training state.

    Returns None if there is no training state, or if it cannot be read.
    """
    for info in reversed(infos):
        for part in info.manifest.parts:
            if part.kind == STATE:
                return _rules_in_state(info, part)
    return None


def _rules_in_state(info: CheckpointInfo, state: PartRecord) -> Keep | None:
    paths = [file.path for file in info.manifest.files if file.path.startswith(f"{state.path}/")]
    documents = [path for path in paths if path.endswith(".json")]
    if not documents:
        return None
    record = document_in(info.store, documents[0], _MAX_DOCUMENT_BYTES).get("keep")
    if not isinstance(record, dict):
        return None
    try:
        return keep_from_record(record)
    except (CheckpointError, KeyError, TypeError, ValueError):
        return None
