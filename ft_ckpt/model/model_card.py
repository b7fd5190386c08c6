"""The model card of an adapter: PEFT's own, without paths of this machine."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from ft_ckpt.checkpoint.hub_names import is_hub_name

_CARD = """---
{head}library_name: peft
tags:
{tags}
---

# Model Card

Adapter trained on top of {base}.

### Framework versions

- PEFT {version}
"""


@lru_cache(maxsize=1)  # compiling its template takes longer than writing an adapter
def blank_card() -> str:
    """The model card that PEFT begins with where there is none."""
    return str(ModelCard.from_template(ModelCardData()))


def name_base(file: Path, base_id: str | None) -> None:
    """Let a card name the base by `base_id`, or not at all if it has a path, which the Hub refuses."""
    card = ModelCard.load(file)
    named = card.data.base_model
    if base_id is None and (not named or is_hub_name(named)):
        return
    card.data.base_model = base_id
    tags = [tag for tag in card.data.tags or () if not tag.startswith("base_model:")]
    card.data.tags = sorted(tags + ([f"base_model:adapter:{base_id}"] if base_id else []))
    card.save(file)


def injected_card(config: Any) -> str:
    """The card that PEFT would write for a PeftModel, for adapters that were injected into a model."""
    import peft  # here, since it is slow to import, and there are adapters only where it has been

    base = config.base_model_name_or_path
    base = base if base and is_hub_name(base) else None
    kind = str(getattr(config.peft_type, "value", config.peft_type)).lower()
    tags = [kind, "transformers"] + ([f"base_model:adapter:{base}"] if base else [])
    return _CARD.format(
        head=f"base_model: {json.dumps(base)}\n" if base else "",  # a JSON string is a YAML string
        tags="\n".join(f"- {json.dumps(tag)}" for tag in sorted(tags)),
        base=f"`{base}`" if base else "a model that is not on the Hub",
        version=peft.__version__,
    )
