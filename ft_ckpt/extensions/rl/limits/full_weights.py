"""Finds in a model's config and tensors what an engine would refuse or misread.

A finding is one line of text about it. Full weights are those of a model, and not of an adapter.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ft_ckpt.extensions.rl.limits.contents import nonfinite_findings, settings_in
from ft_ckpt.formats.files import TensorFile
from ft_ckpt.model.files import differences_between, quantisation_of
from ft_ckpt.storage import Store

# Fields of a config that are used only in training.
_TRAINING_FIELDS = (
    "router_aux_loss_coef",
    "router_z_loss_coef",
    "router_jitter_noise",
    "output_router_logits",
)
_TOKENIZER_FILES = {
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "tekken.json",
    "tokenizer_config.json",
}


def model_findings(store: Store, file: TensorFile) -> Iterator[str]:
    """Yield the findings of a model in the folder `store`, whose tensors are `file`."""
    config = settings_in(store, "config.json")
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
    yield from nonfinite_findings(file)


def compare_configs(
    served: Mapping[str, Any], published: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Compare the config of a server's model with the config of new weights.

    A server keeps the config with which it started. Returns two lists of lines, such as "vocab_size
    32000, 32001 in that of the served model": the fields that change what the model computes, and
    the ids of special tokens. Other token ids may only end an answer early or late.
    """
    differences = []
    token_differences = []
    for name, new, old in differences_between(published, served, "model"):
        field = re.sub(r"\.\d+$", "", name)  # a name may end in an index of a list
        text = f"{field} {new}, {old} in that of the served model"
        if field.endswith("token_id"):
            token_differences.append(text)
        elif field not in _TRAINING_FIELDS:
            differences.append(text)
    return differences, token_differences


def _shape_findings(config: Mapping[str, Any], file: TensorFile) -> Iterator[str]:
    """Yield contradictions between the config and the tensors.

    Only shapes that every decoder has are compared.
    """
    text_config: Mapping[str, Any] = config
    if isinstance(config.get("text_config"), dict):
        text_config = config["text_config"]
    hidden_size = text_config.get("word_embed_proj_dim", text_config.get("hidden_size"))
    fields = (("vocab_size", text_config.get("vocab_size")), ("hidden_size", hidden_size))
    for name, spec in file.specs.items():
        if name.endswith("embed_tokens.weight") and len(spec.shape) == 2:
            for (field, expected), size in zip(fields, spec.shape, strict=True):
                if isinstance(expected, int) and expected != size:
                    yield (
                        f"{name}: shape {list(spec.shape)}, expected {field} {expected} of "
                        "config.json; use another checkpoint"
                    )

    layers = text_config.get("num_hidden_layers")
    if not isinstance(layers, int):
        return

    # Layers of multi-token prediction are stored after the others, or left out.
    max_layers = layers
    prediction_layers = text_config.get("num_nextn_predict_layers")
    if isinstance(prediction_layers, int):
        max_layers += prediction_layers
    counts = _layers_in(file.specs)
    if counts and not any(layers <= count <= max_layers for count in counts):
        yield (
            f"config.json: num_hidden_layers {layers}, and tensors of {max(counts)} layers; use "
            "another checkpoint"
        )


def _layers_in(names: Iterable[str]) -> set[int]:
    """Return the numbers of layers of all stacks, such as a decoder and a vision encoder."""
    counts: dict[str, int] = {}
    for name in names:
        stack, mark, rest = name.partition(".layers.")
        number = rest.partition(".")[0]
        if mark and number.isdecimal():
            counts[stack] = max(counts.get(stack, 0), int(number) + 1)
    return set(counts.values())
