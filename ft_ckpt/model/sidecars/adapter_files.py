"""Writes the sidecar files of an adapter: its config and a model card."""

import copy
import json
from pathlib import Path
from typing import Any

from ft_ckpt.checkpoint.manifest import BaseRecord
from ft_ckpt.model.files import PATTERNS, order_counts
from ft_ckpt.model.sidecars.model_card import blank_card, injected_card, name_base
from ft_ckpt.model.tensors import model_below
from ft_ckpt.ranks.wrappers import unwrap, user_class
from ft_ckpt.storage import Store, read_text
from ft_ckpt.storage.local import LocalStore


def write_adapter(
    folder: Path,
    model: Any,
    adapter: str,
    *,
    base: BaseRecord,
    beside: bool = False,
    base_id: str | None = None,
    library: str = "peft",
) -> None:
    """Write `adapter_config.json` and a model card for one adapter into the existing `folder`.

    `model`: a PeftModel, or a model with injected adapters and a `peft_config`. `beside`: the
    checkpoint contains the base as changed by the adapter's initialisation, so a load must not
    decompose it again. `base_id`: name of the base on the Hub, if it was loaded from elsewhere.
    `library`: the one that reads the weights, for the card, which never contains a local path.
    """
    # on use, because it is slow to import; a process with adapters has already imported it
    import peft

    config = _stored_config(model.peft_config[adapter], adapter)
    if beside and isinstance(getattr(config, "init_lora_weights", None), str):
        config.init_lora_weights = True
    if base_id is not None:
        config.base_model_name_or_path, config.revision = base_id, None
    elif base.id is not None:
        config.base_model_name_or_path = config.base_model_name_or_path or base.id
        config.revision = config.revision or base.revision
    mapping = None
    if config.task_type is None:
        cls = user_class(type(unwrap(model_below(model))))
        mapping = {"base_model_class": cls.__name__, "parent_library": cls.__module__}
    config.save_pretrained(str(folder), auto_mapping_dict=mapping)
    _keep_order_of_patterns(LocalStore(folder), config)
    has_own_card = isinstance(model, peft.PeftModel) and library == "peft"
    card = blank_card() if has_own_card else injected_card(config, library)
    LocalStore(folder).write("README.md", card.encode())
    if has_own_card:
        model.create_or_update_model_card(str(folder))
        name_base(folder / "README.md", base_id)


def _stored_config(live: Any, adapter: str) -> Any:
    """Copy the config, for inference."""
    config = copy.copy(live)  # shallow: a deep copy of a set may iterate in another order
    config.inference_mode = True
    ranks = getattr(config, "rank_pattern", None)
    if isinstance(ranks, dict):  # in the form that PEFT writes for AdaLoRA
        suffix = f".{adapter}"
        config.rank_pattern = {name.removesuffix(suffix): mask for name, mask in ranks.items()}
    return config


def _keep_order_of_patterns(folder: Store, config: Any) -> None:
    """Restore the order of patterns if it can decide which one applies: PEFT sorts them."""
    settings = json.loads(read_text(folder, "adapter_config.json"))
    reordered = {}
    for name in PATTERNS & settings.keys():
        patterns = getattr(config, name)
        if not settings[name] or list(patterns) == list(settings[name]):
            continue
        if order_counts(patterns):
            reordered[name] = dict(patterns)
    if reordered:
        text = json.dumps({**settings, **reordered}, indent=2)
        folder.write("adapter_config.json", text.encode())
