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
    base_is_stored: bool = False,
    base_id: str | None = None,
    library: str = "peft",
) -> None:
    """Write `adapter_config.json` and a model card for one adapter into the existing `folder`.

    Args:
        folder: the folder of the adapter.
        model: a PeftModel, or a model with injected adapters and a `peft_config`.
        adapter: name of the adapter.
        base: record of the base.
        base_is_stored: True if the base is in the same checkpoint, with the changes by the
            adapter's initialisation. Then the config says that a load must not change it again.
        base_id: name of the base on the Hub, if it was loaded from elsewhere.
        library: the library that reads the weights, which the card names.

    The card never contains a local path.
    """
    # peft is imported here because that is slow. A process with adapters has already imported it.
    import peft

    config = _stored_config(model.peft_config[adapter], adapter)
    if base_is_stored and isinstance(getattr(config, "init_lora_weights", None), str):
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
    """Return a copy of the config, as it is stored for inference."""
    # The copy is shallow, because a deep copy of a set can iterate in another order.
    config = copy.copy(live)
    config.inference_mode = True
    ranks = getattr(config, "rank_pattern", None)
    if isinstance(ranks, dict):
        # PEFT's own save of AdaLoRA removes the name of the adapter, too.
        suffix = f".{adapter}"
        config.rank_pattern = {name.removesuffix(suffix): mask for name, mask in ranks.items()}
    return config


def _keep_order_of_patterns(folder: Store, config: Any) -> None:
    """Write the patterns in the order of `config` if the order decides which one applies.

    PEFT has sorted them.
    """
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
