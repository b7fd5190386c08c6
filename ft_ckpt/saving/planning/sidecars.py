"""Makes the sidecar files of a checkpoint, which are all of its files except the weight files.

For example, a saved model has "model.safetensors" with its weights, and the sidecar files
"config.json", "generation_config.json" and "tokenizer.json". The shard index, the state of a run as
JSON and the caller's extra files are sidecar files, too.

The contents are made in memory when the save is planned, and they are written later. A background
save therefore stores them as they were when it was called.

A part is one saved object of the checkpoint, such as the model or an adapter. Each part has a
folder in the checkpoint, and its `PartPlan` says which files the part has there.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from ft_ckpt.checkpoint.manifest import MANIFEST_NAME, BaseRecord
from ft_ckpt.errors import ConfigError
from ft_ckpt.model.base import record_of_base
from ft_ckpt.model.files import EXTRA_FILE, SETTINGS_FILES
from ft_ckpt.model.sidecars import (
    check_config,
    check_sidecars,
    notes_on_classes,
    write_part_files,
    write_tokenizer,
)
from ft_ckpt.model.tensors import Part
from ft_ckpt.ranks import Ranks
from ft_ckpt.ranks.wrappers import user_class
from ft_ckpt.saving.planning.files import PartPlan
from ft_ckpt.saving.planning.request import STATE_DOCUMENT, SaveRequest
from ft_ckpt.storage import is_inside
from ft_ckpt.storage.places import files_made_by


@dataclass(frozen=True, eq=False)
class Sidecars:
    """The contents of the sidecar files at one moment, on rank 0.

    Later changes to the model do not change the contents.

    Attributes:
        files: The content of each file except `document`, by path in the checkpoint.
        bases: The base models of adapters, by the name of the part.
        classes: The class names of the modules, by the name of the part.
        document: The state of the training run, or None if no such state is saved.
        notes: Messages about the tokenizer, for the report and the manifest.
    """

    files: Mapping[str, bytes] = field(default_factory=dict)
    bases: Mapping[str, BaseRecord] = field(default_factory=dict)
    classes: Mapping[str, str] = field(default_factory=dict)
    document: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()

    def contents(self) -> dict[str, bytes]:
        """Return the content of all files by path.

        The document is encoded only now, because the later steps of planning complete it.
        """
        contents = dict(self.files)
        if self.document is not None:
            contents[STATE_DOCUMENT] = json.dumps(self.document, separators=(",", ":")).encode()
        return contents


def sidecars_of(request: SaveRequest, plans: Sequence[PartPlan], ranks: Ranks) -> Sidecars:
    """Make the sidecar files of the live objects as they are now.

    The result is empty on ranks other than 0.

    Raises CompanionError if tokenizer, config and model do not fit together. Raises ConfigError if
    an extra file is outside the checkpoint, or has the path of another file of the checkpoint.
    """
    if not ranks.is_main:
        return Sidecars()

    extra_files = _encode_extra_files(request.extra_files, _reserved_paths(plans))

    parts_with_config = [plan.part for plan in plans if plan.part.kind in ("model", "adapter")]
    notes: list[str] = []
    for part in parts_with_config:
        notes += check_sidecars(part.module, request.tokenizer, request.chat_template_name)

    modules = [plan.part for plan in plans if plan.part.kind != "state"]
    bases = {part.name: record_of_base(part) for part in modules if part.kind == "adapter"}
    files: dict[str, bytes] = {}
    for part in modules:
        files.update(_module_files(part, bases.get(part.name), request))

    if request.tokenizer is not None and parts_with_config:
        files.update(_tokenizer_files(request.tokenizer, parts_with_config))
        notes += notes_on_classes(request.tokenizer)
    elif request.tokenizer is not None:
        notes.append("tokenizer: not written, because no saved module has a config")

    classes = {}
    for plan in plans:
        module = plan.part.module
        classes[plan.part.name] = "" if module is None else user_class(type(module)).__name__

    files.update(_index_and_value_files(plans))
    files.update(extra_files)
    document = None if request.run_state is None else request.run_state.document
    return Sidecars(files, bases, classes, document, tuple(notes))


def check_configs(
    plans: Sequence[PartPlan], sidecars: Sidecars, request: SaveRequest
) -> tuple[str, ...]:
    """Check on rank 0 that the config of each saved model describes the model.

    Returns messages for the report. They are about the tokenizer, and about models that
    `from_pretrained` cannot load. Raises CompanionError for a model that its config does not
    describe.
    """
    is_run = request.run_state is not None
    notes = [*sidecars.notes]
    for plan in plans:
        if plan.part.tensors:
            config = sidecars.files[path_in(plan.part, SETTINGS_FILES["model"])]
            notes += check_config(plan.part, config.decode(), is_run=is_run)
    return tuple(notes)


def path_in(part: Part, name: str) -> str:
    """Return the path in the checkpoint of the file `name` in the folder of the part."""
    return PurePosixPath(part.path, name).as_posix()


def _reserved_paths(plans: Sequence[PartPlan]) -> set[str]:
    """Return the paths that the manifest, the run state, the weights and their indexes use."""
    reserved = {MANIFEST_NAME, STATE_DOCUMENT}
    for plan in plans:
        reserved.add(plan.index_path)
        reserved.update(file.path for file in plan.files)
    return reserved


def _encode_extra_files(files: Mapping[str, str | bytes], reserved: set[str]) -> dict[str, bytes]:
    """Encode the contents of the caller's files.

    Raises ConfigError for paths outside the checkpoint, for `reserved` paths, which the checkpoint
    itself uses, and for contents that are neither text nor bytes.
    """
    outside = [path for path in files if not is_inside(path)]
    if outside:
        named = [path if isinstance(path, str) else repr(path) for path in outside]
        raise ConfigError(
            f"extra_files: {', '.join(named)}: expected plain paths inside the checkpoint"
        )

    refused = sorted(reserved & files.keys())
    if refused:
        raise ConfigError(
            f"extra_files: {', '.join(refused)}: a file of the checkpoint "
            "itself; choose another name"
        )

    kinds = (str, bytes, bytearray, memoryview)
    wrong = [path for path, content in files.items() if not isinstance(content, kinds)]
    if wrong:
        raise ConfigError(f"extra_files: {', '.join(wrong)}: expected text or bytes")
    encoded = {}
    for path, content in files.items():
        encoded[path] = content.encode() if isinstance(content, str) else bytes(content)
    return encoded


def _module_files(part: Part, base: BaseRecord | None, request: SaveRequest) -> dict[str, bytes]:
    """Return the configs and the code of a saved module, by path in the checkpoint.

    `base` is the base model if the part is an adapter.
    """
    write = partial(
        write_part_files,
        part=part,
        base=base,
        base_id=request.base_id,
        tokenizer=request.tokenizer,
        chat_template_name=request.chat_template_name,
    )
    return {path_in(part, name): content for name, content in files_made_by(write).items()}


def _tokenizer_files(tokenizer: Any, parts: Sequence[Part]) -> dict[str, bytes]:
    """Return one copy of the tokenizer's files for each part, by path in the checkpoint."""
    contents = files_made_by(partial(write_tokenizer, tokenizer=tokenizer))
    files = {}
    for part in parts:
        for name, content in contents.items():
            files[path_in(part, name)] = content
    return files


def _index_and_value_files(plans: Sequence[PartPlan]) -> dict[str, bytes]:
    """Return the shard indexes, and the values of state dicts that are no tensors, by path."""
    files = {}
    for plan in plans:
        if plan.part.extra is not None:
            files[path_in(plan.part, EXTRA_FILE)] = plan.part.extra.encode()
        if plan.index is not None:
            files[plan.index_path] = plan.index.encode()
    return files
