"""Finds embeddings that got or lost rows since the base of an adapter was loaded: the adapter takes them along."""

from typing import Any

from ft_ckpt.distributed.wrappers import walk_modules
from ft_ckpt.model.selection import View
from ft_ckpt.storage.place import open_place


def resized_embeddings(part: View, model: Any) -> set[str]:
    """Names of the embedding weights, when their number of rows is not the base model's; `model` is below PEFT's."""
    module: Any = part.module
    if not hasattr(model, "get_input_embeddings") or not hasattr(model, "config"):
        return set()
    layers = [embedding_of(model, ask) for ask in ("get_input_embeddings", "get_output_embeddings")]
    own = {id(layer) for layer in layers if layer is not None}
    paths = (path for path, _, inner in walk_modules(module) if id(inner) in own)
    names = [name for path in paths if (name := f"{path}.weight") in part.sources]
    known = _rows_of_base(module, model)
    return {name for name in names if known is not None and part.sources[name].shape[0] != known}


def embedding_of(model: Any, ask: str = "get_input_embeddings") -> Any:
    """The model's own layer, inside PEFT's, too; None when it has none or several, or its class does not say."""
    try:
        layer = getattr(model, ask)()
    except (AttributeError, NotImplementedError):
        return None
    while (inner := getattr(layer, "base_layer", getattr(layer, "original_module", None))) is not None:
        layer = inner
    return layer


def _rows_of_base(module: Any, model: Any) -> int | None:
    """Vocabulary of the base as it was loaded: from its config on this disk, else from the layers inside the model.

    `resize_token_embeddings` sets the vocabulary of the config and of the outermost module only; the decoder inside
    still knows the number it was made with.
    """
    for config in module.peft_config.values():
        place = getattr(config, "base_model_name_or_path", None)
        if place and (known := _configured_rows(place, model)) is not None:
            return known
    inner = (getattr(child, "vocab_size", None) for child in model.modules() if child is not model)
    return next((rows for rows in inner if isinstance(rows, int)), None)


def _configured_rows(place: str, model: Any) -> int | None:
    from transformers import AutoConfig

    try:
        on_disk = open_place(place).is_folder
        config = AutoConfig.from_pretrained(place, local_files_only=not on_disk, trust_remote_code=False)
    except (OSError, ValueError):
        return None  # not on this machine: the other evidence decides
    rows = getattr(config.get_text_config(), "vocab_size", None)
    return rows if isinstance(rows, int) and type(config) is type(model.config) else None
