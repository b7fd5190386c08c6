"""The config and tensors of full weights that an engine would refuse or misread."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ft_ckpt.extensions.rl.limits.contents import nonfinite_findings, settings_in
from ft_ckpt.formats.files import TensorFile
from ft_ckpt.model.files import differences_between, quantisation_of
from ft_ckpt.storage import Store

_OF_TRAINING = (
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
    """Compare config.json as a server has kept it from its start with that of new weights.

    Returns the fields that change what it computes, and the ids of special tokens, which may end an
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


def _shape_findings(config: Mapping[str, Any], file: TensorFile) -> Iterator[str]:
    """Yield contradictions between the config and the tensors.

    Only shapes that every decoder has are compared.
    """
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
    """Return the number of layers of each stack, such as a decoder and a vision encoder."""
    counts: dict[str, int] = {}
    for name in names:
        stack, mark, rest = name.partition(".layers.")
        number = rest.partition(".")[0]
        if mark and number.isdecimal():
            counts[stack] = max(counts.get(stack, 0), int(number) + 1)
    return set(counts.values())
