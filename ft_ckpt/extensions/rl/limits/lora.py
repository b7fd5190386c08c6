"""Finds in LoRA adapters what an engine would refuse, drop or misread.

A finding is one line of text about it. The inner matrix of a layer is lora_A of shape (rank, in),
and the outer one is lora_B of shape (out, rank). Their product is multiplied by a scale.

Sources: vLLM 0.32 (lora/peft_helper.py, lora/utils.py, docs/features/lora.md), SGLang
(srt/lora/lora_config.py). Older versions silently ignore more fields, so these fields are refused
as well.
"""

import math
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from ft_ckpt.errors import is_number, listing
from ft_ckpt.extensions.rl.limits.contents import FLOATS, nonfinite_findings
from ft_ckpt.formats.files import TensorFile
from ft_ckpt.model.tensors import PREFIX, start_keeps_base

MERGE = "merge it (`ft-ckpt merge`) and publish full weights"
_PATTERNS = ("rank_pattern", "alpha_pattern")
_INNER, _OUTER = ".lora_A.weight", ".lora_B.weight"
_MAX_FLOAT = sys.float_info.max
# Fields of LoRA variants that engines ignore.
_IGNORED_FIELDS = (
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


def adapter_findings(
    settings: Mapping[str, Any], file: TensorFile, max_lora_rank: int
) -> Iterator[str]:
    """Yield the findings that an export cannot fix.

    `settings` are the contents of adapter_config.json.
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
    yield from nonfinite_findings(file)


def scale_findings(engine: str, settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the findings that an export fixes by multiplying the matrices by their scales."""
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


def rank_and_scale(settings: Mapping[str, Any], layer: str) -> tuple[int, float]:
    """Return the rank of a layer's matrices and the scale of their product, by PEFT's rule.

    The keys of rank_pattern and alpha_pattern are regular expressions. The first key applies that
    matches the whole path of the layer, or its end after a dot.
    """
    rank = _pattern_value(settings, "rank_pattern", layer, settings["r"])
    alpha = float(_pattern_value(settings, "alpha_pattern", layer, settings.get("lora_alpha", 8)))
    divisor = math.sqrt(rank) if settings.get("use_rslora") else rank
    return rank, alpha / divisor


def lora_layers(file: TensorFile) -> dict[str, str]:
    """Return the layers with LoRA matrices: the prefix of their tensors by path in the base."""
    layers = {}
    for name in file.specs:
        if name.endswith((_INNER, _OUTER)):
            prefix = name.removesuffix(_INNER).removesuffix(_OUTER)
            layers[prefix.removeprefix(PREFIX)] = prefix
    return layers


def _pattern_value(settings: Mapping[str, Any], field: str, layer: str, default: Any) -> Any:
    for key, value in _pattern(settings, field):
        if re.match(_expression(key), layer):
            return value
    return default


def _rank_findings(settings: Mapping[str, Any], max_rank: int) -> Iterator[str]:
    """Yield invalid ranks, scales and patterns."""
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
    """Return the regular expression that PEFT builds from a key of a pattern."""
    return rf"(.*\.)?({key})$"


def _is_expression(text: str) -> bool:
    try:
        re.compile(_expression(text))
    except (re.error, OverflowError, RecursionError):
        return False
    return True


def _matrix_findings(settings: Mapping[str, Any], file: TensorFile) -> Iterator[str]:
    """Yield layers that do not have two matrices of the rank in the settings."""
    wrong = []
    for layer, prefix in lora_layers(file).items():
        rank, _ = rank_and_scale(settings, layer)
        inner_shape = _shape_of(file, prefix + _INNER)
        outer_shape = _shape_of(file, prefix + _OUTER)
        are_matrices = len(inner_shape) == len(outer_shape) == 2
        if not are_matrices or inner_shape[0] != rank or outer_shape[1] != rank:
            wrong.append(
                f"{layer}: shapes {list(inner_shape)} and {list(outer_shape)}, expected two "
                f"matrices of rank {rank}"
            )
    if wrong:
        yield f"{listing(wrong, '; ', 3)}; engines have no place for them, {MERGE}"


def _shape_of(file: TensorFile, name: str) -> tuple[int, ...]:
    """Return the shape of the tensor `name`, or () if the file does not have it."""
    return tuple(file.specs[name].shape) if name in file.specs else ()


def _type_findings(file: TensorFile) -> Iterator[str]:
    """Yield a finding for matrices of a dtype in which PEFT does not compute LoRA."""
    wrong = [
        f"{name}: {spec.dtype}"
        for name, spec in file.specs.items()
        if name.endswith((_INNER, _OUTER)) and spec.dtype not in FLOATS
    ]
    if wrong:
        yield (
            f"{listing(wrong, '; ', 3)}: expected one of {', '.join(FLOATS)}; use the adapter "
            "in one of them"
        )


def _field_findings(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield fields that engines do not read or do not apply."""
    for field in _IGNORED_FIELDS:
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


def _pattern(settings: Mapping[str, Any], field: str) -> list[tuple[str, Any]]:
    """Return the items of a pattern, or [] if the field is absent or no mapping."""
    pattern = settings.get(field)
    return list(pattern.items()) if isinstance(pattern, dict) else []
