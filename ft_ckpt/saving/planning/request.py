"""The request of one save: what the caller decides, with defaults from the settings."""

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

STATE_DOCUMENT = f"{STATE}/training.json"  # path of the state of a run in the checkpoint


@dataclass(frozen=True, eq=False)
class StateToSave:
    """The state that a run adds to the checkpoint of its model: a part and a JSON document."""

    tensors: ModelTensors  # of the saved model
    sources: Mapping[str, Source]  # the tensors of the saved model by name
    all_sources: tuple[Source, ...]  # of all models of the run
    # makes the part of the state from the other parts and `sources`, and completes the document
    make_part: Callable[[Sequence[Part], Mapping[str, Source]], Part]
    document: dict[str, Any]


@dataclass(frozen=True, eq=False)
class SaveRequest:
    """The arguments of one save, and the functions that its caller adds to some steps."""

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
    run_state: StateToSave | None = None
    run_id: str | None = None
    # further files of the caller, by path in the checkpoint
    extra_files: Mapping[str, str | bytes] = field(default_factory=dict)
    # replicas that differ between ranks; None: not compared yet
    differing: Differences | None = None
    made_from: tuple[str, ...] = ()  # names of the checkpoints that the weights were computed from
    # limit of permissions, see LocalStore; below 0o777 if the checkpoint is made of other files
    max_mode: int = 0o777
    notes: tuple[str, ...] = ()  # further notes for the report and the manifest

    # merges adapters into the base; returns the one part that replaces the model's parts
    merge: Callable[[View], Part] | None = None
    # called if the disk is full: deletes checkpoints that the run in a folder may lose
    make_room: Callable[[Place], object] | None = None
    # adds files of other processes; returns their records, and notes on missing files
    collect: Callable[[Store], tuple[list[FileRecord], list[str]]] | None = None
    # compares the written folder with the live model before the commit; returns a note
    check: Callable[[Path], str] | None = None
    # called before the commit; raises if another process has taken over the run's directory
    check_lease: Callable[[], None] | None = None
    # runs the steps after the commit; returns the report with the handles of their jobs
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
    """Make the request for `model`, with defaults from `config`."""
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
