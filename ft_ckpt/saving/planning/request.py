"""Defines the request of one save: what the caller decides, with defaults from the settings."""

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

# The path of the state of a run in the checkpoint.
STATE_DOCUMENT = f"{STATE}/training.json"


@dataclass(frozen=True, eq=False)
class StateToSave:
    """The state that a run adds to the checkpoint of its model: a part and a JSON document.

    Attributes:
        tensors: The tensors of the saved model.
        sources: The sources of these tensors by name.
        all_sources: The tensors of all models of the run.
        make_part: Makes the part with the tensors of the state, such as those of optimizers, from
            the other parts and `sources`. It also completes the document.
        document: The rest of the state.
    """

    tensors: ModelTensors
    sources: Mapping[str, Source]
    all_sources: tuple[Source, ...]
    make_part: Callable[[Sequence[Part], Mapping[str, Source]], Part]
    document: dict[str, Any]


@dataclass(frozen=True, eq=False)
class SaveRequest:
    """The arguments of one save, and functions of the caller that some steps call.

    Notes are messages about this save, for its report and the manifest.

    Attributes:
        extra_files: Further files of the caller, by path in the checkpoint.
        differing: The replicas that differ between ranks; None if they are not compared yet.
        made_from: Names of the checkpoints from which the weights were computed.
        max_mode: Limit of the permissions of files, see LocalStore. It is below 0o777 if the
            checkpoint is made from files with fewer permissions.
        notes: Further notes.
        merge: Merges adapters into the base model. Returns the one part that replaces the parts of
            the model.
        make_room: Called if the disk is full, with the folder of a run. Deletes checkpoints that
            the run no longer needs.
        collect: Adds files that other processes have written. Returns their records, and notes on
            missing files.
        check: Compares the written folder with the live model before the commit. Returns a note.
        check_lease: Called directly before the commit. Raises an error if another process has taken
            over the directory of the run.
        follow_up: Runs the steps after the commit. Returns the report with the handles of the jobs
            that it has started.
    """

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
    extra_files: Mapping[str, str | bytes] = field(default_factory=dict)
    differing: Differences | None = None
    made_from: tuple[str, ...] = ()
    max_mode: int = 0o777
    notes: tuple[str, ...] = ()

    merge: Callable[[View], Part] | None = None
    make_room: Callable[[Place], object] | None = None
    collect: Callable[[Store], tuple[list[FileRecord], list[str]]] | None = None
    check: Callable[[Path], str] | None = None
    check_lease: Callable[[], None] | None = None
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
