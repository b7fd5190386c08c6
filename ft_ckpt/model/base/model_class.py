"""Finds the class and the config to load the base of adapters with.

The files of a base name the class that was published. But adapters can be trained on another class
with the same body. For example, a classifier gets its labels from the script.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ft_ckpt.checkpoint.manifest import PartRecord
from ft_ckpt.errors import LoadError, damaged_input, listing
from ft_ckpt.model.base.config import changed_fields, config_for, plain_config
from ft_ckpt.model.base.embeddings import embedding_of
from ft_ckpt.model.base.files import current_names
from ft_ckpt.model.empty import transformers_class, without_memory
from ft_ckpt.model.files import absurd_counts
from ft_ckpt.model.tensors import PREFIX, base_name

_MAX_LABELS = 1 << 20  # a stored head with more rows is not one of labels


@dataclass(frozen=True)
class BaseClass:
    """How to make the base of an adapter.

    Attributes:
        cls: a model class of transformers, or an auto class.
        config: its config. None if the files have none.
        later_fields: fields of the config that are valid only once the embeddings are resized.
    """

    cls: Any
    config: Any
    later_fields: Mapping[str, Any] = field(default_factory=dict)

    def complete(self, model: Any) -> None:
        """Set the fields of the config that can only be set once the model is made."""
        for name, value in self.later_fields.items():
            setattr(model.config, name, value)


def find_base_class(
    source: str, record: PartRecord, settings: Mapping[str, Any], **options: Any
) -> BaseClass:
    """Find the class and config for the base of the adapter in `record`.

    `source` is the folder or repository of the base, `settings` is the config of the adapter, and
    `options` are those of `from_pretrained`.

    The class is the recorded one. If none is recorded, or it does not exist here, these are tried
    in order: the class in the adapter's config, the class that the files name, the auto class of
    the adapter's task, AutoModel. The first one that has the modules of the adapter's tensors is
    taken, or the first of all if none has them.
    """
    from transformers import AutoConfig, AutoModel

    try:
        config = AutoConfig.from_pretrained(source, **options)
    except (OSError, ValueError):
        return BaseClass(AutoModel, None)  # Loading AutoModel raises an error that says why.
    base = record.base
    cls = None if base is None else _class_named(base.class_name, config)
    if base is not None and cls is not None:
        class_config = config_for(getattr(cls, "config_class", None), config)
        if class_config is not None:
            return _with_changes(cls, class_config, base.config)
    return _guess_class(config, settings, record)


def _with_changes(cls: Any, config: Any, changes: Mapping[str, Any]) -> BaseClass:
    """Return the class with its config, to which the recorded `changes` are applied."""
    if not changes:
        return BaseClass(cls, config)
    settings = changed_fields(plain_config(config), changes)
    absurd = absurd_counts(settings)
    if absurd:
        raise LoadError(
            f"config of the base, as the adapter records it: {listing(absurd)}; use another copy"
        )

    later_fields: dict[str, Any] = {}
    padding = settings.get("pad_token_id")
    rows = settings.get("vocab_size")

    # The padding token was added in the script, so its row exists only after the resize.
    if isinstance(padding, int) and isinstance(rows, int) and padding >= rows:
        later_fields["pad_token_id"] = padding
        settings["pad_token_id"] = None

    with damaged_input("config of the base, as the adapter records it"):
        return BaseClass(cls, type(config).from_dict(settings), later_fields)


def _guess_class(config: Any, settings: Mapping[str, Any], record: PartRecord) -> BaseClass:
    """Find the first candidate class that has the modules of the adapter's tensors.

    Its config gets as many labels as the head of the adapter has rows. This is for adapters that do
    not record the class of their base: those of PEFT, and of earlier versions.
    """
    from transformers import AutoModel

    candidates = list(dict.fromkeys(_candidates(config, settings)))
    for cls in candidates:
        class_config = config_for(cls.config_class, config)
        if class_config is not None and _has_modules(cls, class_config, record):
            return BaseClass(cls, _with_labels(cls, class_config, record))
    return BaseClass(candidates[0] if candidates else AutoModel, config)


def _candidates(config: Any, settings: Mapping[str, Any]) -> Iterator[Any]:
    from transformers import AutoModel

    names = list(getattr(config, "architectures", None) or ())
    mapping = settings.get("auto_mapping")
    if isinstance(mapping, dict):
        names.insert(0, mapping.get("base_model_class", ""))
    for name in names:
        cls = transformers_class(str(name))
        if cls is not None:
            yield cls

    for auto_class in (_auto_class(str(settings.get("task_type"))), AutoModel):
        if auto_class is not None:
            classes = auto_class._model_mapping.get(type(config), ())
            yield from classes if isinstance(classes, (list, tuple)) else (classes,)


def _class_named(name: str, config: Any) -> Any:
    """Return the class `name` of transformers, or the auto class that loads it.

    The config of a model with custom code names that auto class. Returns None if there is neither.
    """
    import transformers

    cls = transformers_class(name)
    if cls is not None:
        return cls
    for auto, reference in (getattr(config, "auto_map", None) or {}).items():
        if isinstance(reference, str) and reference.rpartition(".")[2] == name:
            return getattr(transformers, auto, None)
    return None


@cache
def _auto_class(task: str) -> Any:
    """Return the auto class of transformers for a task type of PEFT. None: the task is unknown."""
    from peft import auto

    wrapper = auto.MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(task)
    for loader in vars(auto).values():
        if wrapper is not None and getattr(loader, "_target_peft_class", None) is wrapper:
            return loader._target_class
    return None


def _empty_model(cls: Any, config: Any) -> Any:
    with damaged_input("config of the base"), without_memory():
        return cls(config)


def _has_modules(cls: Any, config: Any, record: PartRecord) -> bool:
    """Check whether a model of the class has the outermost modules of the adapter's tensors.

    Names of the installed transformers and of earlier versions count.
    """
    model = _empty_model(cls, config)
    outermost = {name for name, _ in model.named_children()}
    names = []
    for tensor in record.tensors:
        if tensor.name.startswith(PREFIX):
            names.append(tensor.name.removeprefix(PREFIX))
    for name, renamed in zip(names, current_names(model, names), strict=True):
        if outermost.isdisjoint({name.partition(".")[0], renamed.partition(".")[0]}):
            return False
    return True


def _with_labels(cls: Any, config: Any, record: PartRecord) -> Any:
    """Return the config with a number of labels with which more stored tensors fit the model.

    Returns `config` itself if none makes more tensors fit.
    """
    stored = {base_name(tensor.name): tensor.shape for tensor in record.tensors}
    misfits = _misfits(cls, config, stored)
    rows = {stored[name][0] for name in misfits if stored[name]}
    for number in sorted(rows):
        if number > _MAX_LABELS:
            break
        labelled = copy.deepcopy(config)
        labelled.num_labels = number
        if len(_misfits(cls, labelled, stored)) < len(misfits):
            return labelled
    return config


def _misfits(cls: Any, config: Any, stored: Mapping[str, tuple[int, ...]]) -> list[str]:
    """List the stored tensors, other than embeddings, whose shape differs from the model's."""
    model = _empty_model(cls, config)
    embedding = embedding_of(model)
    resized = {f"{name}.weight" for name, module in model.named_modules() if module is embedding}
    shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    misfits = []
    for name, shape in stored.items():
        if shapes.get(name, shape) != shape and name not in resized:
            misfits.append(name)
    return misfits
