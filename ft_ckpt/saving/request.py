"""One call of `save`, with its defaults filled in."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ft_ckpt.config import SaverConfig
from ft_ckpt.model.merge_choice import MergeChoice
from ft_ckpt.model.parts import Attribute
from ft_ckpt.saving import replicas
from ft_ckpt.saving.check_logits import LogitsCheck
from ft_ckpt.storage.access import FREE, Access
from ft_ckpt.storage.place import Place
from ft_ckpt.training.capture import Captured


@dataclass(frozen=True, eq=False)
class SaveRequest:
    """One call of `save`, its defaults filled in."""

    model: nn.Module
    target: Place
    dtype: str
    chat_template_name: str | None
    format: str
    max_shard_bytes: int
    tokenizer: Any
    adapter_only: bool
    step: int | None
    metrics: Mapping[str, float]
    base_id: str | None = None
    attribute: Attribute = None
    state_dict: Mapping[str, Tensor] | None = None
    state_dict_given: bool = False
    captured: Captured | None = None  # the tensors and, for a run, its state; None: to be captured when it is planned
    run_id: str | None = None
    protect: tuple[Place, ...] = ()  # checkpoints not to be deleted for want of room
    extra_files: Mapping[str, str | bytes] = field(default_factory=dict)  # the caller's own, by path in the checkpoint
    apart: replicas.Differences | None = None  # replicas that differ between ranks; None: not compared yet
    made_from: tuple[str, ...] = ()  # names of what the weights were computed from
    access: Access = FREE  # who may read the checkpoint at most, where it is made of other files
    merged: MergeChoice | None = None  # the adapters that are merged into the base
    check: LogitsCheck | None = None  # what the folder must compute before it is committed


def request_of(config: SaverConfig, model: nn.Module, target: Place, **given: Any) -> SaveRequest:
    """The request for `model`, with what `config` says where the call did not."""
    own: dict[str, Any] = {"dtype": config.dtype, "format": config.format, "base_id": config.base_id}
    own |= {"chat_template_name": config.chat_template_name, "max_shard_bytes": config.max_shard_bytes}
    return SaveRequest(model, target, **own, **given)
