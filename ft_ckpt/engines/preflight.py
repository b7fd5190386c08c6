"""What an engine would refuse, drop or misread of a checkpoint, from its files alone.

Sources: vLLM 0.32 (lora/peft_helper.py, lora/utils.py, docs/features/lora.md), SGLang (srt/lora/lora_config.py). Older
versions read fewer fields without a word, so what they would ignore is refused as well.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any

import torch

from ft_ckpt.checkpoint.open_checkpoint import hold_open
from ft_ckpt.errors import CheckpointError, ConfigError
from ft_ckpt.formats.layout import TensorFile
from ft_ckpt.model.folder import open_folder
from ft_ckpt.model.settings import quantisation_of
from ft_ckpt.storage.place import Place
from ft_ckpt.storage.store import Store, read_text

ENGINES = ("vllm", "sglang")
MOST_RANK = 16  # of vLLM without --max-lora-rank
_MERGE = "merge it (`ft-ckpt merge`) and publish full weights"
_EXPORT = "convert it (`ft-ckpt export ADAPTER OUT --for vllm`)"
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal", "mica", "lora_ga")
_FLOATS = ("float64", "float32", "bfloat16", "float16")
_SUPPORTED_TENSORS = ("lora_A.weight", "lora_B.weight")


def check_for(engine: str, folder: str | Place, *, max_lora_rank: int = MOST_RANK) -> list[str]:
    """The reasons why `engine` ("vllm" or "sglang") would not serve the adapter or model in `folder` as it was trained.

    Each is one line: the field or file, what was found, what is expected, what to do. An empty list is no promise that
    the engine knows the architecture; a publish asks the engine itself. `max_lora_rank`: the engine's own setting.

    Raises ConfigError for an unknown engine, and what opening the folder raises.
    """
    if engine not in ENGINES:
        raise ConfigError(f"{engine}: expected one of {', '.join(ENGINES)}")
    with hold_open(folder) as place, closing(open_folder(place, place)) as file:
        return list(findings(engine, place.folder, file, max_lora_rank))


def findings(engine: str, store: Store, file: TensorFile, max_lora_rank: int = MOST_RANK) -> Iterator[str]:
    """As `check_for`, of an open folder."""
    if _settings(store, "adapter_config.json") is not None:
        yield from adapter_findings(engine, store, file, max_lora_rank)
    else:
        yield from _model_findings(store, file)


def adapter_findings(engine: str, store: Store, file: TensorFile, max_lora_rank: int) -> Iterator[str]:
    """The findings of a folder with an adapter."""
    settings = _settings(store, "adapter_config.json") or {}
    if not store.list_folder().exists or not any(each.name.startswith("adapter_model.") for each in store.list()):
        yield "adapter_model.safetensors: missing; expected beside adapter_config.json"
    kind = settings.get("peft_type")
    if kind != "LORA":
        yield f"peft_type: {kind}, expected LORA; {_MERGE}"
        return
    yield from _rank_findings(engine, settings, max_lora_rank)
    yield from _field_findings(settings)
    other = sorted({name for name in file.specs if not name.endswith(_SUPPORTED_TENSORS)})
    if other:
        yield f"{other[0]}: one of {len(other)} tensors that are no LoRA matrices, which would be dropped; {_MERGE}"
    yield from _nonfinite(file)


def _rank_findings(engine: str, settings: Mapping[str, Any], most: int) -> Iterator[str]:
    ranks = {
        "r": settings.get("r"),
        **{f"rank_pattern[{key!r}]": value for key, value in _pattern(settings, "rank_pattern")},
    }
    for field, rank in ranks.items():
        if not isinstance(rank, int) or not 0 < rank <= most:
            yield f"{field}: {rank}, expected 1 to {most}; start the server with a larger --max-lora-rank, or {_MERGE}"
    for field in ("rank_pattern", "alpha_pattern"):
        if settings.get(field):
            yield f"{field}: set, and read by few versions of {engine}: others scale wrongly without a word; {_EXPORT}"


def _field_findings(settings: Mapping[str, Any]) -> Iterator[str]:
    for field in ("use_dora", "lora_bias", "use_bdlora", "use_qalora", "alora_invocation_tokens", "layer_replication"):
        if settings.get(field):
            yield f"{field}: set, and neither read nor applied; {_MERGE}"
    if settings.get("bias") not in (None, "none"):
        yield f"bias: {settings['bias']!r}, expected 'none': trained biases would be dropped; {_MERGE}"
    if settings.get("modules_to_save"):
        yield f"modules_to_save: {settings['modules_to_save']}, which would be dropped; {_MERGE}"
    if settings.get("trainable_token_indices"):
        yield f"trainable_token_indices: set, and trained tokens would be dropped; {_MERGE}"
    if settings.get("target_parameters"):
        names = settings["target_parameters"]
        yield f"target_parameters: {names}: fused experts, which engines order differently; {_MERGE}"
    start = settings.get("init_lora_weights")
    if start not in _PLAIN_STARTS:
        yield (
            f"init_lora_weights: {start!r} changed the base, so that the adapter fits no other; save it with "
            f"path_initial_model_for_weight_conversion, or {_MERGE}"
        )


def _model_findings(store: Store, file: TensorFile) -> Iterator[str]:
    config = _settings(store, "config.json")
    if config is None:
        yield "config.json: missing or no JSON object; engines choose the architecture by it"
        return
    if not config.get("architectures"):
        yield "config.json: no architectures; engines choose the model's class by it"
    if config.get("auto_map"):
        yield f"config.json: auto_map {config['auto_map']}: engines run code of its own with --trust-remote-code only"
    there = {each.name for each in store.list()}
    if not any(name.endswith(".safetensors") for name in there):
        yield "*.safetensors: missing; engines read no other format by default; `ft-ckpt convert SRC DST`"
    if not there & {"tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "tokenizer_config.json"}:
        yield "tokenizer.json: missing; the server would have no tokenizer; save the tokenizer with the model"
    field = quantisation_of(store)
    if field is not None:
        yield f"config.json: {field}: quantised weights, which are not compared after a publish; merge or dequantise"
    yield from _shape_findings(config, file)
    yield from _nonfinite(file)


def _shape_findings(config: Mapping[str, Any], file: TensorFile) -> Iterator[str]:
    """Contradictions between the config and the tensors that every decoder shows."""
    text = config.get("text_config")
    inner: Mapping[str, Any] = text if isinstance(text, dict) else config
    vocabulary, hidden = inner.get("vocab_size"), inner.get("hidden_size")
    for name, spec in file.specs.items():
        if name.endswith("embed_tokens.weight") and len(spec.shape) == 2:
            for field, expected, size in (
                ("vocab_size", vocabulary, spec.shape[0]),
                ("hidden_size", hidden, spec.shape[1]),
            ):
                if isinstance(expected, int) and expected != size:
                    shape = list(spec.shape)
                    yield f"{name}: shape {shape}, expected {field} {expected} of config.json; use another checkpoint"
    layers, held = inner.get("num_hidden_layers"), _layers_in(file.specs)
    if isinstance(layers, int) and held and max(held) + 1 != layers:
        yield f"config.json: num_hidden_layers {layers}, and tensors of {max(held) + 1} layers; use another checkpoint"


def _layers_in(names: Iterable[str]) -> set[int]:
    found = (name.partition(".layers.")[2].partition(".")[0] for name in names if ".layers." in name)
    return {int(number) for number in found if number.isdecimal()}


def _nonfinite(file: TensorFile) -> Iterator[str]:
    for name, spec in file.specs.items():
        if spec.dtype in _FLOATS and not torch.isfinite(file.read(name)).all():
            yield f"{name}: NaN or infinite elements; use an older checkpoint"


def _pattern(settings: Mapping[str, Any], field: str) -> list[tuple[str, Any]]:
    found = settings.get(field)
    return list(found.items()) if isinstance(found, dict) else []


def _settings(store: Store, name: str) -> dict[str, Any] | None:
    try:
        found = json.loads(read_text(store, name))
    except (CheckpointError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
