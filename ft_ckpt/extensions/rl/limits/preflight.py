"""Finds the tensors and settings of a checkpoint that an engine would refuse, drop or misread, from
its files alone.

Sources: vLLM 0.32 (lora/peft_helper.py, lora/utils.py, docs/features/lora.md), SGLang
(srt/lora/lora_config.py). Older versions read fewer fields silently, so the fields that they would
ignore are refused as well.
"""

import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from ft_ckpt.checkpoint import hold_open
from ft_ckpt.checkpoint.manifest import PartRecord
from ft_ckpt.errors import CheckpointError, ConfigError, is_number, listing
from ft_ckpt.formats.files import TensorFile
from ft_ckpt.messages import expected_one_of
from ft_ckpt.model.base import differing_elements
from ft_ckpt.model.files import differences_between, open_folder, quantisation_of
from ft_ckpt.model.tensors import PREFIX, start_keeps_base
from ft_ckpt.storage import Store, read_text
from ft_ckpt.storage.places import Place, open_place

ENGINES = ("vllm", "sglang")
MAX_RANK = 16  # of vLLM without --max-lora-rank
MERGE = "merge it (`ft-ckpt merge`) and publish full weights"
_FLOATS = ("float64", "float32", "bfloat16", "float16")
_PATTERNS = ("rank_pattern", "alpha_pattern")
_INNER, _OUTER = ".lora_A.weight", ".lora_B.weight"
_MAX_FLOAT = sys.float_info.max
_OF_TRAINING = (
    "router_aux_loss_coef",
    "router_z_loss_coef",
    "router_jitter_noise",
    "output_router_logits",
)
_UNREAD = (  # fields of LoRA variants that engines ignore
    "use_dora",
    "lora_bias",
    "use_bdlora",
    "use_qalora",
    "alora_invocation_tokens",
    "layer_replication",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
)
_TOKENIZER_FILES = {
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "tekken.json",
    "tokenizer_config.json",
}


def check_for(
    engine: str, folder: str | os.PathLike[str] | Place, *, max_lora_rank: int = MAX_RANK
) -> list[str]:
    """The reasons why `engine` ("vllm" or "sglang") would not serve the adapter or model in
    `folder` as it was trained.

    Each is one line: the field or file, its value, the expected value, the remedy. An empty list
    does not prove that the engine supports the architecture: only a publish tries that.
    `max_lora_rank`: the engine's own setting.

    Raises ConfigError for an unknown engine, and the errors of opening the folder.
    """
    check_engine(engine)
    with hold_open(open_place(folder)) as place, closing(open_folder(place)) as file:
        return list(findings(engine, place.folder, file, max_lora_rank))


def check_engine(engine: str) -> None:
    """Raise ConfigError if the engine is unknown."""
    if engine not in ENGINES:
        raise ConfigError(f"engine={engine!r}: {expected_one_of(engine, ENGINES)}")


def findings(
    engine: str, store: Store, file: TensorFile, max_lora_rank: int = MAX_RANK
) -> Iterator[str]:
    """As `check_for`, for an open folder."""
    settings = _settings(store, "adapter_config.json")
    if settings is None:
        yield from _model_findings(store, file)
        return
    if not any(stored.name.startswith("adapter_model.") for stored in store.list()):
        yield "adapter_model.safetensors: missing; expected beside adapter_config.json"
    yield from _scale_findings(engine, settings)
    yield from adapter_findings(settings, file, max_lora_rank)


def needs_export(engine: str, store: Store) -> bool:
    """Whether the folder has an adapter that `engine` would scale wrongly, and that `export`
    converts.
    """
    settings = _settings(store, "adapter_config.json") or {}
    return any(_scale_findings(engine, settings))


def _scale_findings(engine: str, settings: Mapping[str, Any]) -> Iterator[str]:
    """The findings that an export fixes: it folds the scales into the matrices."""
    export = f"convert it (`ft-ckpt export ADAPTER OUT --for {engine}`)"
    for field in _PATTERNS:
        if settings.get(field):
            yield (
                f"{field}: set, and read by few versions of {engine}: others scale wrongly and "
                f"say nothing; {export}"
            )
    if engine == "sglang" and settings.get("use_rslora"):
        yield (
            "use_rslora: set, and not read by sglang: it scales by lora_alpha / r, expected "
            f"lora_alpha / sqrt(r); {export}"
        )


def adapter_findings(
    settings: Mapping[str, Any], file: TensorFile, max_lora_rank: int
) -> Iterator[str]:
    """The findings of an adapter with the `settings` of adapter_config.json, except those that an
    export fixes.
    """
    kind = settings.get("peft_type")
    if kind != "LORA":
        yield f"peft_type: {kind}, expected LORA; {MERGE}"
        return
    wrong_ranks = list(_rank_findings(settings, max_lora_rank))
    yield from wrong_ranks
    yield from _field_findings(settings)
    dropped = sorted(name for name in file.specs if not name.endswith((_INNER, _OUTER)))
    if dropped:
        yield (
            f"{dropped[0]}: one of {len(dropped)} tensors that are no LoRA matrices, which would "
            f"be dropped; {MERGE}"
        )
    if not lora_layers(file):
        yield "adapter_model.safetensors: no LoRA matrices in it; use another copy"
    if not wrong_ranks:
        yield from _matrix_findings(settings, file)
    yield from _type_findings(file)
    yield from _nonfinite(file)


def rank_and_scale(settings: Mapping[str, Any], layer: str) -> tuple[int, float]:
    """The rank of a layer's matrices, and the factor of their product, by PEFT's rule.

    In a pattern, the first key applies that matches the whole layer path or its end after a dot, as
    regular expression.
    """
    rank = _pattern_value(settings, "rank_pattern", layer, settings["r"])
    alpha = float(_pattern_value(settings, "alpha_pattern", layer, settings.get("lora_alpha", 8)))
    divisor = math.sqrt(rank) if settings.get("use_rslora") else rank
    return rank, alpha / divisor


def _pattern_value(settings: Mapping[str, Any], field: str, layer: str, default: Any) -> Any:
    for key, value in _pattern(settings, field):
        if re.match(_expression(key), layer):
            return value
    return default


def lora_layers(file: TensorFile) -> dict[str, str]:
    """The paths of the layers with matrices in the base model, each with the prefix of its tensors'
    names.
    """
    layers = {}
    for name in file.specs:
        if name.endswith((_INNER, _OUTER)):
            head = name.removesuffix(_INNER).removesuffix(_OUTER)
            layers[head.removeprefix(PREFIX)] = head
    return layers


def compare_base(record: PartRecord, base_path: str) -> tuple[list[str], str]:
    """Compare the server's base, in the folder `base_path`, with the base of the adapter.

    Returns the findings, and the reason why nothing was compared ("" if it was).
    """
    if record.base is None or not record.base.fingerprint:
        return [], "the checkpoint has no record of it"
    if not Path(base_path).is_absolute() or not open_place(base_path).exists:
        return [], f"{base_path or 'the path of the server'} is not a folder here; see visible_at="
    try:
        place = open_place(base_path)
        with hold_open(place, compares=False) as opened, closing(open_folder(opened)) as file:
            compared, names = differing_elements(file, record)
    except (CheckpointError, OSError) as error:
        return [], str(error)
    if names:
        finding = (
            f"{listing(names, ', ', 3)}: {len(names)} of {len(record.base.fingerprint)} sampled "
            f"tensors of the base that the server holds, {base_path}, differ from the one that the "
            f"adapter was trained on ({record.base.id or 'built in memory'}); start the server "
            "with that base"
        )
        return [finding], ""
    return [], "" if compared else f"{base_path} has none of its sampled tensors"


def compare_configs(
    served: Mapping[str, Any], published: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """The fields of config.json that a server keeps from its start, and that differ from those of
    new weights.

    Returns those that change what it computes, and the ids of special tokens, which may end an
    answer early or late; each as "field, value in `published`, value in `served`" in words.
    """
    changing, tokens = [], []
    for name, new, old in differences_between(published, served, "model"):
        field = re.sub(r"\.\d+$", "", name)  # without the place in a list
        text = f"{field} {new}, {old} in that of the served model"
        if field.endswith("token_id"):
            tokens.append(text)
        elif field not in _OF_TRAINING:
            changing.append(text)
    return changing, tokens


def _rank_findings(settings: Mapping[str, Any], max_rank: int) -> Iterator[str]:
    ranks = {"r": settings.get("r")}
    for key, value in _pattern(settings, "rank_pattern"):
        ranks[f"rank_pattern[{key!r}]"] = value
    for field, rank in ranks.items():
        if not isinstance(rank, int) or not 0 < rank <= max_rank:
            yield (
                f"{field}: {rank}, expected 1 to {max_rank}; start the server with a larger "
                f"--max-lora-rank, or {MERGE}"
            )
    alphas = {"lora_alpha": settings.get("lora_alpha", 8)}
    for key, value in _pattern(settings, "alpha_pattern"):
        alphas[f"alpha_pattern[{key!r}]"] = value
    for field, alpha in alphas.items():
        if not is_number(alpha, -_MAX_FLOAT, _MAX_FLOAT):
            yield f"{field}: {alpha}, expected a number; use another copy"
    for field in _PATTERNS:
        if not isinstance(settings.get(field) or {}, dict):
            yield f"{field}: {settings[field]!r}, expected layers with numbers; use another copy"
    for field in _PATTERNS:
        for key, _ in _pattern(settings, field):
            if not _is_expression(key):
                yield (
                    f"rank_pattern, alpha_pattern: {key!r} is no regular expression; use another "
                    "copy"
                )


def _expression(key: str) -> str:
    """The regular expression that PEFT makes of a key of a pattern."""
    return rf"(.*\.)?({key})$"


def _is_expression(text: str) -> bool:
    try:
        re.compile(_expression(text))
    except (re.error, OverflowError, RecursionError):
        return False
    return True


def _matrix_findings(settings: Mapping[str, Any], file: TensorFile) -> Iterator[str]:
    """Layers that do not have two matrices of the rank in the settings."""
    wrong = []
    for layer, head in lora_layers(file).items():
        rank, _ = rank_and_scale(settings, layer)
        inner = _shape_of(file, head + _INNER)
        outer = _shape_of(file, head + _OUTER)
        are_matrices = len(inner) == len(outer) == 2
        if not are_matrices or inner[0] != rank or outer[1] != rank:
            wrong.append(
                f"{layer}: shapes {list(inner)} and {list(outer)}, expected two matrices "
                f"of rank {rank}"
            )
    if wrong:
        yield f"{listing(wrong, '; ', 3)}; engines have no place for them, {MERGE}"


def _shape_of(file: TensorFile, name: str) -> tuple[int, ...]:
    return tuple(file.specs[name].shape) if name in file.specs else ()


def _type_findings(file: TensorFile) -> Iterator[str]:
    """Matrices of a dtype in which PEFT does not compute LoRA."""
    wrong = [
        f"{name}: {spec.dtype}"
        for name, spec in file.specs.items()
        if name.endswith((_INNER, _OUTER)) and spec.dtype not in _FLOATS
    ]
    if wrong:
        yield (
            f"{listing(wrong, '; ', 3)}: expected one of {', '.join(_FLOATS)}; use the adapter "
            "in one of them"
        )


def _field_findings(settings: Mapping[str, Any]) -> Iterator[str]:
    for field in _UNREAD:
        if settings.get(field):
            yield f"{field}: set, and neither read nor applied; {MERGE}"
    if settings.get("bias") not in (None, "none"):
        yield (
            f"bias: {settings['bias']!r}, expected 'none': trained biases would be dropped; {MERGE}"
        )
    if settings.get("modules_to_save"):
        yield f"modules_to_save: {settings['modules_to_save']}, which would be dropped; {MERGE}"
    if settings.get("trainable_token_indices"):
        yield f"trainable_token_indices: set, and trained tokens would be dropped; {MERGE}"
    if settings.get("target_parameters"):
        names = settings["target_parameters"]
        yield f"target_parameters: {names}: fused experts, which engines order differently; {MERGE}"
    start = settings.get("init_lora_weights")
    if not start_keeps_base(start):
        yield (
            f"init_lora_weights: {start!r} changed the base, so that the adapter fits no other; "
            f"save it with path_initial_model_for_weight_conversion, or {MERGE}"
        )


def _model_findings(store: Store, file: TensorFile) -> Iterator[str]:
    config = _settings(store, "config.json")
    if config is None:
        yield "config.json: missing or no JSON object; engines choose the architecture by it"
        return
    if not config.get("architectures"):
        yield "config.json: no architectures; engines choose the model's class by it"
    if config.get("auto_map"):
        yield (
            f"config.json: auto_map {config['auto_map']}: engines run code of its own with "
            "--trust-remote-code only"
        )
    names = {stored.name for stored in store.list()}
    if not any(name.endswith(".safetensors") for name in names):
        yield (
            "*.safetensors: missing; engines read no other format by default; `ft-ckpt convert "
            "SRC DST`"
        )
    if not names & _TOKENIZER_FILES:
        yield (
            "tokenizer.json: missing; the server would have no tokenizer; save the tokenizer "
            "with the model"
        )
    field = quantisation_of(store)
    if field is not None:
        yield (
            f"config.json: {field}: quantised weights, which are not compared after a publish; "
            "merge or dequantise"
        )
    yield from _shape_findings(config, file)
    yield from _nonfinite(file)


def _shape_findings(config: Mapping[str, Any], file: TensorFile) -> Iterator[str]:
    """Contradictions between the config and the tensors, for shapes that every decoder has."""
    text = config.get("text_config")
    inner: Mapping[str, Any] = text if isinstance(text, dict) else config
    hidden_size = inner.get("word_embed_proj_dim", inner.get("hidden_size"))
    fields = (("vocab_size", inner.get("vocab_size")), ("hidden_size", hidden_size))
    for name, spec in file.specs.items():
        if name.endswith("embed_tokens.weight") and len(spec.shape) == 2:
            for (field, expected), size in zip(fields, spec.shape, strict=True):
                if isinstance(expected, int) and expected != size:
                    yield (
                        f"{name}: shape {list(spec.shape)}, expected {field} {expected} of "
                        "config.json; use another checkpoint"
                    )
    layers = inner.get("num_hidden_layers")
    if not isinstance(layers, int):
        return
    # of multi-token prediction, stored after the others or left out
    prediction_layers = inner.get("num_nextn_predict_layers")
    max_layers = layers + (prediction_layers if isinstance(prediction_layers, int) else 0)
    counts = _layers_in(file.specs)
    if counts and not any(layers <= count <= max_layers for count in counts):
        yield (
            f"config.json: num_hidden_layers {layers}, and tensors of {max(counts)} layers; use "
            "another checkpoint"
        )


def _layers_in(names: Iterable[str]) -> set[int]:
    """The number of layers of each stack, such as a decoder and a vision encoder."""
    counts: dict[str, int] = {}
    for name in names:
        stack, mark, rest = name.partition(".layers.")
        number = rest.partition(".")[0]
        if mark and number.isdecimal():
            counts[stack] = max(counts.get(stack, 0), int(number) + 1)
    return set(counts.values())


def _nonfinite(file: TensorFile) -> Iterator[str]:
    for name, spec in file.specs.items():
        if spec.dtype in _FLOATS and not torch.isfinite(file.read(name)).all():
            yield f"{name}: NaN or infinite elements; use an older checkpoint"


def _pattern(settings: Mapping[str, Any], field: str) -> list[tuple[str, Any]]:
    pattern = settings.get(field)
    return list(pattern.items()) if isinstance(pattern, dict) else []


def _settings(store: Store, name: str) -> dict[str, Any] | None:
    try:
        document = json.loads(read_text(store, name))
    except (CheckpointError, ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None
