"""Loads the base model of adapters that are stored without it."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ft_ckpt.checkpoint import OpenCheckpoint, checkpoint_around, open_checkpoint
from ft_ckpt.checkpoint.manifest import PartRecord
from ft_ckpt.errors import CorruptError, LoadError, listing
from ft_ckpt.model.base import find_base_class
from ft_ckpt.model.empty import diffusers_class
from ft_ckpt.model.files import adapter_settings, compare_torch_sums
from ft_ckpt.model.load.request import LoadOptions
from ft_ckpt.model.tensors import is_config_of_diffusers, stored_base_names
from ft_ckpt.storage import read_text
from ft_ckpt.storage.places import Place, open_place


def load_base(
    checkpoint: OpenCheckpoint, adapters: Sequence[PartRecord], options: LoadOptions
) -> nn.Module:
    """Load the base model for `adapters`.

    It is `options.base` (a module, a folder or an id), or the recorded base if that is None. Custom
    code of the base runs only with `trust_remote_code`. The user is never prompted for it. A base
    in a checkpoint of ft_ckpt is compared with its manifest, and with all digests if `verify`.

    Raises LoadError when no base is known, when it cannot be loaded, and when neither its files nor
    the adapters have one of its tensors. Raises CorruptError when its files are damaged.
    """
    if isinstance(options.base, nn.Module):
        return options.base
    record = adapters[0]
    source = options.base
    if source is None and record.base is not None:
        source = record.base.id
    if source is None:
        raise LoadError(
            f"adapter {record.adapter!r}: its base was built in memory and has no id; pass base="
        )

    place = open_place(source)
    _refuse_damaged_base(place, options.verify)
    try:
        class_name = _class_in_diffusers(place)
        if class_name is not None:
            return _load_diffusers(class_name, source, record)
        return _load_transformers(source, checkpoint, adapters, options)
    except (OSError, ValueError) as error:
        raise LoadError(
            f"adapter {record.adapter!r}: base model {str(source)!r} cannot be loaded ({error}); "
            "pass base= with a model, a folder or an id"
        ) from error


def _refuse_damaged_base(place: Place, verify: bool) -> None:
    """Raise CorruptError if the files of a base in a folder are damaged.

    The files of a checkpoint of ft_ckpt are compared with its manifest. In another folder, torch's
    files are compared with their checksums. A base that is given by an id is not compared.
    """
    if not place.is_folder:
        return
    around = checkpoint_around(place)
    if around is not None:
        with open_checkpoint(Place(around[0])) as base:
            problems = base.find_problems(deep=verify)
            if problems:
                raise CorruptError(
                    f"{base.location}: {listing(problems)}; use another copy of the base"
                )
        return

    names = [file.name for file in place.folder.list_folder().objects]
    if not any(name.endswith(".safetensors") for name in names):
        compare_torch_sums(place.folder, names)


def _class_in_diffusers(place: Place) -> str | None:
    """Return the name of the class of a model of diffusers in the folder `place`.

    Returns None for another model, and if there is no such folder.
    """
    if not place.is_folder or place.folder.stat("config.json") is None:
        return None
    config = json.loads(read_text(place.folder, "config.json"))
    return str(config["_class_name"]) if is_config_of_diffusers(config) else None


def _load_diffusers(class_name: str, source: Any, record: PartRecord) -> nn.Module:
    dtype = getattr(torch, record.base.dtype if record.base else "float32")
    model: nn.Module = diffusers_class(class_name, {}).from_pretrained(source, torch_dtype=dtype)
    return model


def _load_transformers(
    source: Any,
    checkpoint: OpenCheckpoint,
    adapters: Sequence[PartRecord],
    options: LoadOptions,
) -> nn.Module:
    record = adapters[0]
    revision = None
    if record.base is not None and options.base is None:
        revision = record.base.revision
    trusts = options.trust_remote_code
    settings = adapter_settings(Place(checkpoint.store, record.path).folder)
    base = find_base_class(
        str(source), record, settings, revision=revision, trust_remote_code=trusts
    )
    model, info = base.cls.from_pretrained(
        source,
        config=base.config,
        dtype="auto",
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        revision=revision,
        trust_remote_code=trusts,
    )
    _refuse_drawn(info, adapters, str(source))
    base.complete(model)
    return model  # type: ignore[no-any-return]  # transformers is not typed


def _refuse_drawn(info: Mapping[str, Any], adapters: Sequence[PartRecord], source: str) -> None:
    """Raise LoadError naming the tensors that transformers drew at random and no adapter replaces.

    `info` is transformers' report of the load.
    """
    drawn = {*info["missing_keys"]}
    drawn.update(str(item[0]) for item in info["mismatched_keys"])
    replaced: set[str] = set()
    for record in adapters:
        replaced.update(stored_base_names(record))
    lost = sorted(drawn - replaced)
    if lost:
        raise LoadError(
            f"{listing(lost, ', ')}: neither in the files of the base {source} nor in those of the "
            "adapter, so each load would draw other values; pass the model that the adapter was "
            "trained on with base="
        )
