"""Makes empty transformers models from their folder.

Only classes of transformers are made. The number of stored tensors limits their size, so that a
damaged config cannot ask for a huge model.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import nn

from ft_ckpt.checkpoint import OpenCheckpoint
from ft_ckpt.checkpoint.manifest import PartRecord
from ft_ckpt.errors import LoadError, listing
from ft_ckpt.model.empty.making import without_memory
from ft_ckpt.model.files import absurd_counts, path_in_part, weight_names
from ft_ckpt.model.tensors import is_pretrained, made_by_class, stored_as_in_memory
from ft_ckpt.ranks.wrappers import ModelTensors, unwrap
from ft_ckpt.storage import Store, read_text
from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage.places import Place, local_folder

# A model registers at most so many parameters for each stored tensor. A stored tensor can be split,
# and a parameter can be registered more than once.
_PARAMETERS_PER_TENSOR = 16


def transformers_class(name: str) -> Any:
    """Return the model class `name` of transformers, or None if there is none."""
    import transformers

    cls = getattr(transformers, name, None) if name.isidentifier() else None
    return cls if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel) else None


def class_of_own_code(config: Mapping[str, Any], record: PartRecord) -> Any:
    """Return the auto class of transformers that loads a model with custom code.

    It runs such code only with `trust_remote_code`. Raises LoadError if the model has no custom
    code.
    """
    import transformers

    if not config.get("auto_map"):
        raise LoadError(
            f"{record.class_name!r}: no model class of transformers, and no code beside the "
            "weights; load them into a model of yours with into="
        )
    if "AutoModelForCausalLM" in config["auto_map"]:
        return transformers.AutoModelForCausalLM
    return transformers.AutoModel


def checked_config(store: Store, record: PartRecord) -> dict[str, Any]:
    """Read the config.json of a part. Raises LoadError for absurd counts, as a billion layers."""
    config: dict[str, Any] = json.loads(read_text(store, path_in_part(record, "config.json")))
    absurd = absurd_counts(config)
    if absurd:
        raise LoadError(
            f"config.json: {listing(absurd)}: no model of the {len(record.tensors):,} tensors in "
            "the checkpoint; use another copy"
        )
    return config


def max_parameters(record: PartRecord) -> int:
    """Return an upper bound on the number of parameters of a model with the stored tensors."""
    return _PARAMETERS_PER_TENSOR * (len(record.tensors) + 256)


def empty_model(cls: Any, checkpoint: OpenCheckpoint, record: PartRecord) -> Any:
    """Make the model of a part, without memory for its parameters.

    Returns None if transformers must load the model itself.
    """
    from transformers import AutoConfig

    weights = {name.rpartition("/")[2] for name in weight_names(record)}
    with part_folder(checkpoint, record, lambda name: name not in weights) as folder:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with without_memory():
            model = cls(config)
        sources = ModelTensors(model).sources(allow_meta=True)
        if not made_by_class(model).isdisjoint(sources):
            return None  # only transformers' loader computes the values of such tensors
        if not stored_as_in_memory(model, sources):
            return None
        if any(tensor.name not in sources for tensor in record.tensors):
            return None
        add_folder_settings(model, folder)
        add_origin(model, folder, checkpoint, record)

    return model


def is_converted(model: nn.Module) -> bool:
    """Check whether transformers converts tensors of `model` between memory and file.

    The model may be wrapped.
    """
    inner = unwrap(model)
    if not is_pretrained(inner) or getattr(inner, "is_quantized", False):
        return False
    return not stored_as_in_memory(inner, ModelTensors(model).sources(allow_meta=True))


def part_folder(
    checkpoint: OpenCheckpoint,
    record: PartRecord,
    is_read: Callable[[str], bool] = lambda name: True,
) -> AbstractContextManager[Path]:
    """Yield a local path of a part's folder, for libraries that read its files.

    From a bucket, the files whose names are accepted by `is_read` are downloaded. Subfolders are
    not, because they belong to other parts.
    """
    place = Place(checkpoint.store, record.path)
    return local_folder(place, lambda name: "/" not in name and is_read(name))


def add_origin(
    model: nn.Module, read_from: Path, checkpoint: OpenCheckpoint, record: PartRecord
) -> None:
    """Set `name_or_path` of transformers models and their configs to the folder of the part.

    Its present value is `read_from`, which is a temporary copy if the checkpoint is in a bucket.
    """
    origin = checkpoint.place.folder.where(record.path)
    for module in model.modules():
        owners: list[Any] = [module, getattr(module, "config", None)]
        for owner in owners:
            if getattr(owner, "name_or_path", None) == str(read_from):
                owner.name_or_path = origin


def add_folder_settings(model: Any, folder: Path) -> None:
    """Give a model that was made from the config in `folder` what `from_pretrained` would add.

    That is its generation config and `name_or_path`.
    """
    from transformers import GenerationConfig

    if model.can_generate() and LocalStore(folder).stat("generation_config.json") is not None:
        model.generation_config = GenerationConfig.from_pretrained(folder)
    model.name_or_path = str(folder)
