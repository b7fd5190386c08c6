"""The request of one save: all that the caller decides, with defaults filled in."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ft_ckpt.checkpoint.commit import STATE
from ft_ckpt.config import SaverConfig
from ft_ckpt.model.parts import Attribute
from ft_ckpt.model.tensors import Part, View
from ft_ckpt.ranks.sharding import Source
from ft_ckpt.ranks.wrappers import ModelTensors
from ft_ckpt.saving.planning.replicas import Differences
from ft_ckpt.saving.planning.report import SaveReport
from ft_ckpt.storage import Store
from ft_ckpt.storage.digests import FileRecord
from ft_ckpt.storage.places import Place

STATE_DOCUMENT = f"{STATE}/training.json"  # its path in the checkpoint


@dataclass(frozen=True, eq=False)
class ExtraState:
    """What a run adds to the checkpoint of its model: a part of tensors and a JSON document."""

    tensors: ModelTensors  # of the saved model
    sources: Mapping[str, Source]  # the same by name
    all_sources: tuple[Source, ...]  # of all models of the run
    # makes the part from the other parts and `sources`, and completes the document
    make_part: Callable[[Sequence[Part], Mapping[str, Source]], Part]
    document: dict[str, Any]


@dataclass(frozen=True, eq=False)
class SaveRequest:
    """The arguments of one save, and what its caller does in some of the steps."""

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
    extra_state: ExtraState | None = None  # of a run
    run_id: str | None = None
    # from the caller, by path in the checkpoint
    extra_files: Mapping[str, str | bytes] = field(default_factory=dict)
    # replicas that differ between ranks; None: not compared yet
    differing: Differences | None = None
    made_from: tuple[str, ...] = ()  # names of the checkpoints that the weights were computed from
    max_mode: int = 0o777  # see LocalStore; less where the checkpoint is made of other files
    notes: tuple[str, ...] = ()  # further ones for the report and the manifest

    # merges adapters into the base: the one part that is saved in place of the model's parts
    merge: Callable[[View], Part] | None = None
    # if the disk is full: deletes from the run's folder what the run may lose; None: nothing
    make_room: Callable[[Place], object] | None = None
    # adds files of other processes: their records, and notes on those that are missing
    collect: Callable[[Store], tuple[list[FileRecord], list[str]]] | None = None
    # compares the written folder with the live model before the commit; returns a note
    check: Callable[[Path], str] | None = None
    # raises if another process has taken the run's directory over; before the commit
    check_lease: Callable[[], None] | None = None
    # the steps after the commit; returns the report with their handles
    follow_up: Callable[[SaveReport], SaveReport] | None = None

    @property
    def kind(self) -> str:
        """The kind of the checkpoint, for its manifest."""
        if self.attribute is not None:
            return "attribute"
        return "adapter" if self.adapter_only else "full"


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
