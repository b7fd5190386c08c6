"""What a checkpoint says beside its tensors: configs, tokenizer, model card, a run's document, files of the caller."""

import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from ft_ckpt.checkpoint.manifest import BaseRecord
from ft_ckpt.distributed.ranks import Ranks
from ft_ckpt.distributed.wrappers import user_class
from ft_ckpt.errors import ConfigError, explained
from ft_ckpt.model import pretrained_files as companions
from ft_ckpt.model.entries import EXTRA_FILE, main_dtype
from ft_ckpt.model.plain_module import write_module
from ft_ckpt.saving.build_manifest import base_record
from ft_ckpt.saving.files import PartPlan
from ft_ckpt.saving.plan import SaveRequest
from ft_ckpt.storage.paths import is_inside
from ft_ckpt.training.state import DOCUMENT_NAME, Document

_MEMORY, _PLENTY_BYTES = "/dev/shm", 1 << 30  # noqa: S108 - a folder of its own is made in it


@dataclass(frozen=True, eq=False)
class Companions:
    """What a checkpoint says beside its tensors, on rank 0: taken at one moment, whatever becomes of the model."""

    files: Mapping[str, bytes] = field(default_factory=dict)  # by path in the checkpoint
    bases: Mapping[str, BaseRecord] = field(default_factory=dict)  # of adapters, by the names of their parts
    classes: Mapping[str, str] = field(default_factory=dict)  # of what the parts are of


def companions_of(request: SaveRequest, plans: Sequence[PartPlan], document: Document, ranks: Ranks) -> Companions:
    """What the checkpoint will say beside its tensors, from the live objects as they are now; nothing but on rank 0.

    Raises CompanionError when tokenizer, config and model do not fit, ConfigError for extra files out of the folder.
    """
    if not ranks.leads:
        return Companions()
    extras = _encode_extra_files(request.extra_files)
    parts = [one.part for one in plans]
    settings = {
        id(part): check_companions(part.module, request.tokenizer, request.chat_template_name)
        for part in parts
        if part.kind not in ("module", "state")
    }
    place = _scratch_folder()
    with explained(Path(place)), tempfile.TemporaryDirectory(prefix="ft_ckpt-", dir=place) as made:
        folder = Path(made)
        for one in plans:
            _write_companions(folder, one, request, document, settings.get(id(one.part)))
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    bases = {part.name: base_record(part, {}) for part in parts if part.kind == "adapter"}
    classes = {p.name: "" if p.module is None else user_class(type(p.module)).__name__ for p in parts}
    return Companions(files | extras, bases, classes)


def _scratch_folder() -> str:
    """Where files are made that are read back at once: in memory where there is plenty, since training waits."""
    with suppress(OSError):
        if os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > _PLENTY_BYTES:
            return _MEMORY
    return tempfile.gettempdir()


def check_companions(module: nn.Module, tokenizer: Any, chat_template_name: str | None) -> Any:
    """The generation settings for `module`, if it has any. Raises CompanionError when they or the tokenizer misfit."""
    if hasattr(module, "config") and tokenizer is not None:
        companions.check_tokenizer(module, tokenizer)
    if not hasattr(module, "generation_config"):
        return None
    return companions.generation_config(module, tokenizer, chat_template_name)


def _write_companions(root: Path, one: PartPlan, request: SaveRequest, document: Document, generation: Any) -> None:
    part, folder = one.part, root / one.part.path
    folder.mkdir(parents=True, exist_ok=True)
    if part.kind == "model":
        companions.write_model(
            folder, part.module, dtype=main_dtype(part), tokenizer=request.tokenizer, generation=generation
        )
    elif part.kind == "adapter":
        base = base_record(part, {})
        companions.write_adapter(
            folder,
            part.module,
            str(part.adapter),
            base=base,
            beside=part.beside,
            base_id=request.base_id,
            tokenizer=request.tokenizer,
        )
    elif part.kind == "state":
        (folder / DOCUMENT_NAME).write_text(json.dumps(document, separators=(",", ":")), encoding="utf-8")
    else:
        write_module(folder, part.module, {entry.name: entry.shape for entry in part.entries})
    if part.extra is not None:
        (folder / EXTRA_FILE).write_text(part.extra, encoding="utf-8")
    if one.index is not None:
        (root / one.index_path).write_text(one.index, encoding="utf-8")


def _encode_extra_files(files: Mapping[str, str | bytes]) -> dict[str, bytes]:
    outside = [path for path in files if not is_inside(path)]
    if outside:
        raise ConfigError(f"extra_files: {', '.join(outside)}: expected plain paths inside the checkpoint")
    return {path: content.encode() if isinstance(content, str) else bytes(content) for path, content in files.items()}
