"""Writes the model card of an adapter as PEFT does."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from ft_ckpt.checkpoint.manifest import is_hub_name

_CARD = """---
{head}library_name: {library}
tags:
{tags}
---

# Model Card

Adapter trained on top of {base}.

### Framework versions

- PEFT {version}
"""


@lru_cache(maxsize=1)  # because compiling the template takes longer than writing an adapter
def blank_card() -> str:
    """Return the empty model card that PEFT starts from."""
    return str(ModelCard.from_template(ModelCardData()))


def name_base(file: Path, base_id: str | None) -> None:
    """Set the base model in a card to `base_id`.

    If that is None, a local path in the card is removed, because the Hub refuses it.
    """
    card = ModelCard.load(file)
    base_in_card = card.data.base_model
    if base_id is None and (not base_in_card or is_hub_name(base_in_card)):
        return
    card.data.base_model = base_id
    tags = [tag for tag in card.data.tags or () if not tag.startswith("base_model:")]
    if base_id:
        tags.append(f"base_model:adapter:{base_id}")
    card.data.tags = sorted(tags)
    card.save(file)


def injected_card(config: Any, library: str = "peft") -> str:
    """Make the model card of injected adapters, as PEFT writes it for a PeftModel.

    `library` is the library that reads the adapters.
    """
    # peft is imported here because that is slow. A process with adapters has already imported it.
    import peft

    base = config.base_model_name_or_path
    method = str(getattr(config.peft_type, "value", config.peft_type)).lower()
    tags = [method, "transformers" if library == "peft" else library]
    head = ""
    base_text = "a model that is not on the Hub"
    if base and is_hub_name(base):
        tags.append(f"base_model:adapter:{base}")
        head = f"base_model: {json.dumps(base)}\n"  # a JSON string is a YAML string
        base_text = f"`{base}`"

    return _CARD.format(
        library=library,
        head=head,
        tags="\n".join(f"- {json.dumps(tag)}" for tag in sorted(tags)),
        base=base_text,
        version=peft.__version__,
    )
