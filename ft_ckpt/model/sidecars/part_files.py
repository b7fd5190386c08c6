"""Writes the sidecar files of a part as its library does."""

from pathlib import Path
from typing import Any

from torch import nn

from ft_ckpt.checkpoint.manifest import DIFFUSERS_LORA_FILE, BaseRecord
from ft_ckpt.model.empty import is_diffusers, write_config
from ft_ckpt.model.sidecars.adapter_files import write_adapter
from ft_ckpt.model.sidecars.generation import generation_config
from ft_ckpt.model.sidecars.model_files import write_model
from ft_ckpt.model.sidecars.tokenizer import check_tokenizer
from ft_ckpt.model.tensors import Part


def check_sidecars(
    module: nn.Module, tokenizer: Any, chat_template_name: str | None
) -> tuple[str, ...]:
    """Check that the tokenizer and the generation settings fit the model.

    Returns notes on tokens that the model cannot read. Raises CompanionError when the tokenizer, or
    generation settings made from it, do not fit.
    """
    if chat_template_name is not None:
        generation_config(module, tokenizer, chat_template_name)
    if tokenizer is None or not hasattr(module, "config"):
        return ()
    return check_tokenizer(module, tokenizer)


def write_part_files(
    folder: Path,
    part: Part,
    *,
    base: BaseRecord | None,
    base_id: str | None,
    tokenizer: Any,
    chat_template_name: str | None,
) -> None:
    """Write the config of a model, or of an adapter on `base`, into the existing `folder`.

    Raises CompanionError when the config refuses to be saved.
    """
    if part.kind == "model" and is_diffusers(part.module):
        write_config(folder, part)
    elif part.kind == "model":
        generation = generation_config(part.module, tokenizer, chat_template_name)
        write_model(folder, part.module, dtype=part.main_dtype, generation=generation)
    elif base is not None:
        write_adapter(
            folder,
            part.module,
            str(part.adapter),
            base=base,
            base_is_stored=part.base_is_stored,
            base_id=base_id,
            library="diffusers" if part.file == DIFFUSERS_LORA_FILE else "peft",
        )
