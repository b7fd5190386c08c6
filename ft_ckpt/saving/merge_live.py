"""Makes of a model with a quantised base one on ordinary weights, with the live adapters: what is then merged."""

import copy
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn

from ft_ckpt.checkpoint.open_checkpoint import hold_open
from ft_ckpt.config import make_config
from ft_ckpt.distributed.ranks import Ranks
from ft_ckpt.distributed.wrappers import unwrap
from ft_ckpt.model.attach_adapters import attach_adapters
from ft_ckpt.model.quantised_base import QuantisedBase
from ft_ckpt.saving.execute import run_save
from ft_ckpt.saving.merge_files import base_on_files
from ft_ckpt.saving.move_tensors import SharedFolders
from ft_ckpt.saving.request import SaveRequest, request_of
from ft_ckpt.saving.stored_adapters import StoredAdapters, find_adapters, find_base
from ft_ckpt.storage.local_store import temporary_store
from ft_ckpt.storage.place import Place
from ft_ckpt.storage.source_proof import prove_sources


def onto_plain_base(
    model: nn.Module, base: str | Path | None, *, dequantize: bool, in_memory: bool, stack: ExitStack
) -> nn.Module:
    """The adapters of `model` on the model in the folder `base`, or on what the quantised weights stand for.

    Without a `base` it is the one that the adapters name. It lasts until the stack ends; `in_memory` it can run. Each
    rank makes its own, and the live model is not changed. Raises LoadError where there is no base, BaseMismatchError
    for one that this was not quantised from, CorruptError for a damaged one, SelectionError for a model that is cut
    over ranks.
    """
    live = QuantisedBase(model)
    stored = _store_adapters(unwrap(model), stack)
    if dequantize:
        plain = live.dequantised(in_memory=in_memory)
    else:
        found = find_base(stored, base)
        place = stack.enter_context(hold_open(found))
        plain = base_on_files(place, found, dequantize=False, in_memory=in_memory).model
        live.refuse_other(plain, str(found))
        prove_sources()  # here: another thread or rank may commit
    made: Any = attach_adapters(plain, stored.held, stored.records, check_base=not dequantize)[0]
    inside = made.get_base_model()
    inside.config, inside.name_or_path = live.plain_config(), live.module.name_or_path
    inside.generation_config = copy.deepcopy(getattr(live.module, "generation_config", None))
    return made  # type: ignore[no-any-return]  # PEFT is not typed


def _store_adapters(model: Any, stack: ExitStack) -> StoredAdapters:
    """All adapters of the model, stored in a scratch folder by this process alone, whatever group it is in."""
    target, config = Place(stack.enter_context(temporary_store()), "adapters"), make_config(None, {})
    own: dict[str, Any] = {"adapter_only": True, "step": None, "metrics": {}, "tokenizer": None}
    request: SaveRequest = request_of(config, model, target, **own)
    run_save(request, None, Ranks(0, 1, channel="quiet"), config, time.monotonic(), None, SharedFolders())
    return find_adapters(target, list(model.peft_config), stack)
