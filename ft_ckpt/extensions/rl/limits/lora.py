"""The settings and tensors of LoRA adapters that an engine would refuse, drop or misread.

Sources: vLLM 0.32 (lora/peft_helper.py, lora/utils.py, docs/features/lora.md), SGLang
(srt/lora/lora_config.py). Older versions read fewer fields silently, so the fields that they would
ignore are refused as well.
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


def adapter_findings(
    settings: Mapping[str, Any], file: TensorFile, max_lora_rank: int
) -> Iterator[str]:
    """Yield the findings of an adapter that an export does not fix.

    `settings` are those of adapter_config.json.
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
    """Yield the findings that an export fixes: it folds the scales into the matrices."""
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
    """Return the rank of a layer's matrices, and the factor of their product, by PEFT's rule.

    In a pattern, the first key applies that matches the whole layer path or its end after a dot, as
    regular expression.
    """
    rank = _pattern_value(settings, "rank_pattern", layer, settings["r"])
    alpha = float(_pattern_value(settings, "alpha_pattern", layer, settings.get("lora_alpha", 8)))
    divisor = math.sqrt(rank) if settings.get("use_rslora") else rank
    return rank, alpha / divisor


def lora_layers(file: TensorFile) -> dict[str, str]:
    """Return the paths of the base's layers with LoRA matrices, with their tensors' prefixes."""
    layers = {}
    for name in file.specs:
        if name.endswith((_INNER, _OUTER)):
            head = name.removesuffix(_INNER).removesuffix(_OUTER)
            layers[head.removeprefix(PREFIX)] = head
    return layers


def _pattern_value(settings: Mapping[str, Any], field: str, layer: str, default: Any) -> Any:
    for key, value in _pattern(settings, field):
        if re.match(_expression(key), layer):
            return value
    return default


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
    """Return the regular expression that PEFT makes of a key of a pattern."""
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
    """Yield the matrices of a dtype in which PEFT does not compute LoRA."""
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


def _pattern(settings: Mapping[str, Any], field: str) -> list[tuple[str, Any]]:
    pattern = settings.get(field)
    return list(pattern.items()) if isinstance(pattern, dict) else []
