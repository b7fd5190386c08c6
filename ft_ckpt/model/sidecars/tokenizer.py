"""Checks that a model has an embedding row for each token, and writes the tokenizer's files."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.models.auto.processing_auto import processor_class_from_name

from ft_ckpt.errors import CompanionError, listing
from ft_ckpt.model.base import embedding_of
from ft_ckpt.ranks.wrappers import layout_of

_SPECIAL_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def check_tokenizer(model: nn.Module, tokenizer: Any) -> tuple[str, ...]:
    """Return a note on the tokens that have no row in the model's input embedding.

    Some published models have such tokens: Gemma 3 1B has the image token of the larger models. But
    special tokens (end, start, padding, ...) and tokens of the chat template are in every text.
    Raises CompanionError if one of these has no row. More rows than tokens are valid padding.
    """
    text_tokenizer = tokenizer_of_text(tokenizer)
    rows = embedding_rows(model)
    if text_tokenizer is None or rows is None:
        return ()
    tokens = _tokens_from(text_tokenizer, rows)
    problems = _special_tokens_from(text_tokenizer, rows)
    templates = "".join(_chat_templates(text_tokenizer, tokenizer))
    for token, number in tokens.items():
        if str(token) in templates:
            problems.append(f"{token!r} of the chat template has id {number}")

    if problems:
        raise CompanionError(
            f"tokenizer: {listing(problems, ', ')}, the model has {rows} embedding rows; call "
            f"model.resize_token_embeddings({len(text_tokenizer)}) before training, or pass the "
            "tokenizer the model was trained with"
        )

    if not tokens:
        return ()
    names = listing([repr(token) for token in tokens], ", ")
    note = (
        f"tokenizer: {names}: {len(tokens)} token(s) without a row among the model's {rows} "
        "embedding rows; the model cannot read a text with one of them"
    )
    return (note,)


def _tokens_from(tokenizer: Any, first_id: int) -> dict[Any, int]:
    """Return the ids of the tokens from `first_id` on, by token."""
    ids = list(range(first_id, len(tokenizer)))
    if not ids:
        return {}
    return dict(zip(tokenizer.convert_ids_to_tokens(ids), ids, strict=True))


def _special_tokens_from(tokenizer: Any, first_id: int) -> list[str]:
    """Return a text for each special token with an id of at least `first_id`."""
    lines = []
    for kind in _SPECIAL_TOKENS:
        number = getattr(tokenizer, f"{kind}_token_id", None)
        if isinstance(number, int) and number >= first_id:
            lines.append(f"the {kind}_token has id {number}")
    return lines


def _chat_templates(*owners: Any) -> Iterator[str]:
    """Yield the texts of the chat templates of a tokenizer and its processor."""
    for owner in owners:
        template = getattr(owner, "chat_template", None)
        texts = template.values() if isinstance(template, dict) else [template]
        for text in texts:
            if text:
                yield str(text)


def tokenizer_of_text(tokenizer: Any) -> Any:
    """Return the tokenizer itself, or that of a processor. Return None if a processor has none."""
    text_tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    return text_tokenizer if hasattr(text_tokenizer, "convert_tokens_to_ids") else None


def token_id(model: nn.Module, tokenizer: Any, token: str) -> int:
    """Return the id of a stop token.

    Raises CompanionError when the token is not in the vocabulary, or the model has no row for it.
    """
    number = tokenizer.convert_tokens_to_ids(token)
    is_unknown = number == tokenizer.unk_token_id and token != str(tokenizer.unk_token)
    if number is None or is_unknown:
        raise CompanionError(
            f"tokenizer: {token!r} is not in the vocabulary (id {number}), expected it as a stop "
            "token; add it to the tokenizer before training, or use another chat_template_name"
        )

    rows = embedding_rows(model)
    if rows is not None and number >= rows:
        raise CompanionError(
            f"tokenizer: {token!r} has id {number}, the model has {rows} embedding rows; call "
            "model.resize_token_embeddings(len(tokenizer)) before training"
        )

    return int(number)


def embedding_rows(model: nn.Module) -> int | None:
    """Return the number of rows of the input embedding, or None if it is unknown.

    It is the size that the embedding layer declares, or the global shape of its weight, or the
    vocab_size of the config.
    """
    embedding = embedding_of(model)
    rows = getattr(embedding, "num_embeddings", None)
    if isinstance(rows, int):
        return rows
    weight = getattr(embedding, "weight", None)
    shape = layout_of(weight).shape if isinstance(weight, torch.Tensor) else ()
    if len(shape) == 2:  # A convolution that embeds images has more dimensions.
        return shape[0]
    try:
        config: Any = model.config
        return getattr(config.get_text_config(decoder=True), "vocab_size", None)
    except (AttributeError, ValueError):
        # There is no config, or it has several text configs.
        return None


def write_tokenizer(folder: Path, tokenizer: Any) -> None:
    """Write the files of a tokenizer or processor into the existing `folder`.

    A class that transformers cannot find is stored as an ancestor that it finds. The live tokenizer
    is not changed.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        # A processor modifies its tokenizer when it is saved, so both are copied.
        tokenizer = copy.deepcopy(tokenizer)
    elif _substitutes(tokenizer):
        tokenizer = copy.copy(tokenizer)
    for part, substitute in _substitutes(tokenizer):
        part.__class__ = substitute
    tokenizer.save_pretrained(str(folder))


def notes_on_classes(tokenizer: Any) -> tuple[str, ...]:
    """Return a note for each class that `write_tokenizer` stores as another one."""
    notes = []
    for part, substitute in _substitutes(tokenizer):
        notes.append(
            f"{type(part).__name__}: a class that transformers does not have, saved as its "
            f"{substitute.__name__}; its own code is not in the checkpoint"
        )
    return tuple(notes)


def _substitutes(tokenizer: Any) -> list[tuple[Any, type]]:
    """Return the parts of a tokenizer or processor whose class no Auto class finds.

    The script defines such a class, or a library makes it at run time. Each part comes with the
    ancestor of its class to store it as.
    """
    parts = [tokenizer]
    parts += [part for part in vars(tokenizer).values() if hasattr(part, "save_pretrained")]
    substitutes = []
    for part in parts:
        cls = _findable_class(type(part))
        if cls is not None and cls is not type(part):
            substitutes.append((part, cls))
    return substitutes


def _findable_class(cls: type) -> type | None:
    """Return the class itself or its nearest ancestor that transformers finds, None without one.

    transformers finds its own classes, registered ones, and those whose code is in the checkpoint.
    """
    for base in cls.__mro__:
        has_code = getattr(base, "_auto_class", None) is not None
        is_exported = getattr(transformers, base.__name__, None) is base
        if has_code or is_exported or processor_class_from_name(base.__name__) is base:
            return base
    return None
