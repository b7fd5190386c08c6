"""Finds the embeddings of a base model, and those that were resized after it was loaded."""

from functools import lru_cache
from typing import Any

from ft_ckpt.model.base.files import config_in_files
from ft_ckpt.model.empty import Shapes, read_config, shapes_of_new
from ft_ckpt.model.tensors import View
from ft_ckpt.ranks.wrappers import user_class, walk_modules

_GETTERS = ("get_input_embeddings", "get_output_embeddings")


def embedding_of(model: Any, getter: str = "get_input_embeddings") -> Any:
    """Return the embedding layer of a model, without PEFT layers around it.

    Returns None if the model has none.
    """
    try:
        layer = getattr(model, getter)()
    except (AttributeError, NotImplementedError):
        return None
    while True:
        inner = getattr(layer, "base_layer", getattr(layer, "original_module", None))
        if inner is None:
            return layer
        layer = inner


def resized_embeddings(view: View, model: Any) -> set[str]:
    """Return the names of the embedding weights that were resized after the base was loaded.

    `model` is the base model in `view`.
    """
    if not hasattr(model, "get_input_embeddings") or not hasattr(model, "config"):
        return set()
    rows = _rows_of_base(view.module, model)
    if rows is None:
        return set()
    suspected = [name for name in _weights(view, model) if view.sources[name].shape[0] != rows]
    if not suspected:
        return set()

    # Some classes make more rows than their config has words, for example Molmo2's. So the number
    # of rows is compared with that of a new model, too.
    shapes = _shapes_with_words(user_class(type(model)), model.config.to_json_string(), rows)
    base_names = {id(source): name for name, source in view.base_sources()}
    resized = set()
    for name in suspected:
        source = view.sources[name]
        if source.shape != shapes.get(base_names[id(source)]):
            resized.add(name)

    return resized


def _weights(view: View, model: Any) -> list[str]:
    """Return the names of the weights of input and output embeddings."""
    layers = [embedding_of(model, getter) for getter in _GETTERS]
    ids = {id(layer) for layer in layers if layer is not None}
    paths = [path for path, _, module in walk_modules(view.module) if id(module) in ids]
    names = [f"{path}.weight" for path in paths]
    return [name for name in names if name in view.sources]


@lru_cache(4)  # so that the model is made once for all saves of a run
def _shapes_with_words(cls: type, config: str, words: int) -> Shapes:
    """Return the shapes of a new model of the class, for a vocabulary of `words` words.

    `config` is the text of its config, whose number of words is replaced. Returns {} if the class
    cannot make a model of it.
    """
    try:
        changed = read_config(cls.config_class, config)  # type: ignore[attr-defined]  # of transformers' classes
        changed.get_text_config().vocab_size = words
        return shapes_of_new(cls, changed, {})[0]
    except Exception:  # noqa: BLE001 - anything that a class of a script raises
        return {}


def _rows_of_base(module: Any, model: Any) -> int | None:
    """Return the vocabulary size of the base before a resize, or None if it is unknown.

    It is taken from the config in the files of the base, if they are on this machine. Otherwise it
    is taken from an inner module. `resize_token_embeddings` changes the config and the outermost
    module only, so the decoder inside keeps the old size.
    """
    for config in module.peft_config.values():
        source = getattr(config, "base_model_name_or_path", None)
        rows = _configured_rows(source, model) if source else None
        if rows is not None:
            return rows
    for inner in model.modules():
        rows = getattr(inner, "vocab_size", None)
        if inner is not model and isinstance(rows, int):
            return rows
    return None


def _configured_rows(source: str, model: Any) -> int | None:
    config = config_in_files(source)
    if config is None or type(config) is not type(model.config):
        return None
    rows = getattr(config.get_text_config(), "vocab_size", None)
    return rows if isinstance(rows, int) else None
