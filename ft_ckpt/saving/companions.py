"""What a checkpoint says beside its tensors: configs, tokenizer, model card, a run's document, files of the caller."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from torch import nn

from ft_ckpt.checkpoint.manifest import BaseRecord
from ft_ckpt.distributed.ranks import Ranks
from ft_ckpt.distributed.wrappers import user_class
from ft_ckpt.errors import ConfigError
from ft_ckpt.model import pretrained_files as companions
from ft_ckpt.model.entries import Part, main_dtype
from ft_ckpt.model.plain_module import module_text
from ft_ckpt.model.settings import EXTRA_FILE, MODULE_NAME
from ft_ckpt.saving.build_manifest import base_record
from ft_ckpt.saving.files import PartPlan
from ft_ckpt.saving.request import SaveRequest
from ft_ckpt.storage.local_store import LocalStore
from ft_ckpt.storage.paths import is_inside
from ft_ckpt.storage.scratch import files_made_by
from ft_ckpt.training.state import DOCUMENT_NAME, FOLDER, Document


@dataclass(frozen=True, eq=False)
class Companions:
    """What a checkpoint says beside its tensors, on rank 0: taken at one moment, whatever becomes of the model."""

    files: Mapping[str, bytes] = field(default_factory=dict)  # by path in the checkpoint
    bases: Mapping[str, BaseRecord] = field(default_factory=dict)  # of adapters, by the names of their parts
    classes: Mapping[str, str] = field(default_factory=dict)  # of what the parts are of
    document: Document = field(default_factory=dict)  # of a run

    def contents(self) -> dict[str, bytes]:
        """All files by path. The text of the document is made now: nothing changes it any more."""
        text = json.dumps(self.document, separators=(",", ":")).encode()
        return {**self.files, **({f"{FOLDER}/{DOCUMENT_NAME}": text} if self.document else {})}


def companions_of(request: SaveRequest, plans: Sequence[PartPlan], document: Document, ranks: Ranks) -> Companions:
    """The files beside the tensors, from the live objects as they are now; empty on ranks other than 0.

    `document` is that of a run's state. Raises CompanionError when tokenizer, config and model do not fit, ConfigError
    for extra files out of the folder.
    """
    if not ranks.leads:
        return Companions()
    extras = _encode_extra_files(request.extra_files, {file.path for one in plans for file in one.files})
    described = [one.part for one in plans if one.part.kind in ("model", "adapter")]
    for part in described:
        check_companions(part.module, request.tokenizer, request.chat_template_name)
    parts = [one.part for one in plans if one.part.kind != "state"]
    files: dict[str, bytes] = {}
    for part in parts:
        made = files_made_by(partial(_write_companions, part=part, request=request))
        files |= {_path_in(part, name): content for name, content in made.items()}
    tokens = _tokenizer_files(described, request.tokenizer)
    return Companions(
        {**files, **tokens, **_files_of_plans(plans), **extras},
        {part.name: base_record(part, {}) for part in parts if part.kind == "adapter"},
        {one.part.name: _class_name(one.part.module) for one in plans},
        document,
    )


def _class_name(module: nn.Module | None) -> str:
    return "" if module is None else user_class(type(module)).__name__


def check_companions(module: nn.Module, tokenizer: Any, chat_template_name: str | None) -> None:
    """Raise CompanionError when the tokenizer, or the generation settings it is to give, misfit the module."""
    if hasattr(module, "config") and tokenizer is not None:
        companions.check_tokenizer(module, tokenizer)
    if chat_template_name is not None:
        companions.generation_config(module, tokenizer, chat_template_name)


def _write_companions(folder: Path, part: Part, request: SaveRequest) -> None:
    if part.kind == "model":
        generation = companions.generation_config(part.module, request.tokenizer, request.chat_template_name)
        companions.write_model(folder, part.module, dtype=main_dtype(part), generation=generation)
    elif part.kind == "adapter":
        how: dict[str, Any] = {"base": base_record(part, {}), "beside": part.beside, "base_id": request.base_id}
        companions.write_adapter(folder, part.module, str(part.adapter), **how)
    else:
        text = module_text(part.module, {entry.name: entry.shape for entry in part.entries})
        LocalStore(folder).write(MODULE_NAME, text.encode())


def _tokenizer_files(parts: Sequence[Part], tokenizer: Any) -> dict[str, bytes]:
    """Those of the tokenizer, for each part; made once."""
    if tokenizer is None or not parts:
        return {}
    made = files_made_by(lambda folder: companions.write_tokenizer(folder, tokenizer))
    return {_path_in(part, name): content for part in parts for name, content in made.items()}


def _files_of_plans(plans: Sequence[PartPlan]) -> dict[str, bytes]:
    extra = {_path_in(one.part, EXTRA_FILE): one.part.extra for one in plans}
    texts = {**extra, **{one.index_path: one.index for one in plans}}
    return {path: text.encode() for path, text in texts.items() if text is not None}


def _path_in(part: Part, name: str) -> str:
    return PurePosixPath(part.path, name).as_posix()


def _encode_extra_files(files: Mapping[str, str | bytes], weights: set[str]) -> dict[str, bytes]:
    outside = [path for path in files if not is_inside(path)]
    if outside:
        raise ConfigError(f"extra_files: {', '.join(outside)}: expected plain paths inside the checkpoint")
    if taken := sorted(weights & files.keys()):
        raise ConfigError(f"extra_files: {', '.join(taken)}: the weights have this name; choose another")
    return {path: content.encode() if isinstance(content, str) else bytes(content) for path, content in files.items()}
