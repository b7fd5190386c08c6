"""The request of one save."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ft_ckpt.config import SaverConfig
from ft_ckpt.extensions.tools import LogitsCheck
from ft_ckpt.model import Attribute, MergeChoice
from ft_ckpt.runs import Captured
from ft_ckpt.saving.replicas import Differences
from ft_ckpt.storage import FileRecord, Place, Store


@dataclass(frozen=True, eq=False)
class SaveRequest:
    """The arguments of one save, with defaults filled in."""

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
    # the tensors and, for a run, its state; None: captured by `plan_save`
    captured: Captured | None = None
    run_id: str | None = None
    protect: tuple[Place, ...] = ()  # checkpoints that are not deleted to make room
    # from the caller, by path in the checkpoint
    extra_files: Mapping[str, str | bytes] = field(default_factory=dict)
    # replicas that differ between ranks; None: not compared yet
    differing: Differences | None = None
    made_from: tuple[str, ...] = ()  # names of the checkpoints that the weights were computed from
    max_mode: int = 0o777  # see LocalStore; less where the checkpoint is made of other files
    merged: MergeChoice | None = None  # the adapters that are merged into the base
    # compared with the output of the written folder before the commit
    check: LogitsCheck | None = None
    # collects the writers' files in it
    collect: Callable[[Store], tuple[list[FileRecord], list[str]]] | None = None
    notes: tuple[str, ...] = ()  # further ones for the report and the manifest
    # raises if another process has taken the run's directory over
    check_lease: Callable[[], None] | None = None


def request_of(
    config: SaverConfig, model: nn.Module, target: Place, **arguments: Any
) -> SaveRequest:
    """The request for `model`, with defaults from `config`."""
    return SaveRequest(
        model,
        target,
        dtype=config.dtype,
        format=config.format,
        base_id=config.base_id,
        chat_template_name=config.chat_template_name,
        max_shard_bytes=config.max_shard_bytes,
        **arguments,
    )
