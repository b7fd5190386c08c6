"""Divides the model of a save into parts.

A part is what a library loads from one folder: a model, a plain module such as a value head, or an
adapter. For example, a model with two adapters that is saved in full has three parts.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ft_ckpt.errors import IncompleteError, NotAnAdapterError, SelectionError, listing
from ft_ckpt.messages import short_repr
from ft_ckpt.model.parts.adapters import adapter_parts, check_complete, missing_trainable
from ft_ckpt.model.parts.lora_layout import in_lora_layout
from ft_ckpt.model.tensors import (
    Part,
    View,
    has_adapters,
    irreproducible,
    model_part,
    module_at,
    refuse_merged,
    view_of,
)
from ft_ckpt.ranks.sharding import Source

Attribute = str | Sequence[str] | None


def check_model(model: Any) -> None:
    """Raise SelectionError, with what to pass instead, for an object that is not a model."""
    if isinstance(model, nn.Module):
        return
    kind = model.__name__ if isinstance(model, type) else type(model).__name__
    raise SelectionError(f"model: {kind}, expected a torch.nn.Module; {_right_argument(model)}")


def _right_argument(model: Any) -> str:
    if isinstance(model, type):
        return "pass an instance of the class"
    if isinstance(model, Mapping):
        return (
            "pass the model itself; for values that differ from its own, "
            "save(model, path, state_dict=...)"
        )

    if isinstance(model, (str, PurePath)):
        return "the path comes second: save(model, path)"
    if isinstance(model, (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)):
        return (
            "register it, register(model=model, optimizer=optimizer, ...), and save the run "
            "with save_state()"
        )

    if isinstance(model, (list, tuple)):
        return "pass one model to each save"
    attributes = []
    for name, value in getattr(model, "__dict__", {}).items():
        if isinstance(value, nn.Module):
            attributes.append(f".{name}")

    if attributes:
        return f"pass the model that it has as {', '.join(attributes)}"
    if hasattr(model, "save_pretrained"):
        return (
            "pass the model, and a tokenizer or processor as tokenizer=: save(model, path, "
            "tokenizer=...)"
        )

    return "pass the model that was trained"


def model_inside(model: nn.Module) -> nn.Module:
    """Return the model inside torch's AveragedModel (EMA, SWA), and any other model unchanged.

    An AveragedModel also counts its averages. The count is state of the run, and is saved if the
    AveragedModel is registered. Raises SelectionError for a pipeline of diffusers.
    """
    _refuse_pipeline(model)
    if isinstance(model, AveragedModel) and isinstance(model.module, nn.Module):
        return model.module
    return model


def _refuse_pipeline(model: Any) -> None:
    components = getattr(model, "components", None)
    if isinstance(model, nn.Module) or not isinstance(components, Mapping):
        return
    models = []
    for name, value in components.items():
        if isinstance(value, nn.Module):
            models.append(f"pipeline.{name}")
    if models:
        raise SelectionError(
            f"{type(model).__name__}: a pipeline of several models, expected one of them: "
            f"{', '.join(models)}; pipeline.save_pretrained(...) saves the whole pipeline"
        )


def saves_adapters_only(model: nn.Module, adapter_only: bool | None, attribute: Attribute) -> bool:
    """Check whether a save stores the adapters alone.

    `adapter_only` is the user's choice. If it is None, a model without adapters is stored in full,
    and a model with adapters raises SelectionError. The user must choose for the latter, because
    other readers load only the base from a folder with both. Also raises SelectionError if
    `attribute` is not a name or a sequence of names.
    """
    names = _checked_names(attribute)
    if adapter_only is not None:
        return adapter_only
    adapted = [name or "the model" for name in names if has_adapters(module_at(model, name))]
    if adapted:
        raise SelectionError(
            f"{', '.join(adapted)}: has PEFT adapters; say what to save: adapter_only=True, the "
            "adapters alone, which go onto their base; or adapter_only=False, the base and its "
            "adapters side by side, which only ft_ckpt.load_model puts together"
        )
    return False


def parts_of(
    model: nn.Module,
    sources: Mapping[str, Source],
    *,
    adapter_only: bool,
    attribute: Attribute,
    dtype: str,
    extra: Mapping[str, Any] | None = None,
    merge: Callable[[View], Part] | None = None,
) -> list[Part]:
    """Divide a model into the parts of a save.

    Args:
        model: the live model.
        sources: its tensors, by name.
        adapter_only: True stores only adapters.
        attribute: the submodule to save, or None for the model. It is stored in the root of the
            checkpoint. If it is a list, each submodule is stored in a folder of its name.
        dtype: a dtype of torch, "config" or "as_is".
        extra: the non-tensor values of the model's state dict.
        merge: makes the part of the model with its adapters merged into the base.

    Raises SelectionError or a subclass if the arguments do not fit the model, and IncompleteError
    naming tensors that would be in no part.
    """
    if attribute is None or isinstance(attribute, str):
        name = attribute or ""
        view = view_of(model, sources, name, extra)
        if merge is not None:
            parts = [merge(view)]
        else:
            parts = _parts_of_view(view, name, "", adapter_only, dtype)
        _refuse_missing(parts, [view], adapter_only)
        return parts

    views = {name: view_of(model, sources, name, extra) for name in _checked_names(attribute)}
    if adapter_only and not any(view.has_adapters for view in views.values()):
        raise NotAnAdapterError(
            f"adapter_only=True: none of {', '.join(views)} has a PEFT adapter; use "
            "adapter_only=False"
        )

    parts = []
    for name, view in views.items():
        # A submodule without adapters, such as a value head, is saved in full.
        is_adapter = adapter_only and view.has_adapters
        parts += _parts_of_view(view, name, name, is_adapter, dtype)

    _refuse_missing(parts, views.values(), adapter_only)
    return parts


def _checked_names(attribute: Attribute) -> list[str]:
    """Return the names of the submodules to save, "" for the model itself.

    Raises SelectionError unless they are different names.
    """
    if attribute is None:
        return [""]
    names = [attribute] if isinstance(attribute, str) else attribute
    are_names = isinstance(names, Sequence) and all(isinstance(name, str) for name in names)
    if not names or not are_names or len(set(names)) != len(names):
        raise SelectionError(
            f"attribute={short_repr(attribute)}: expected a name, or several in a list, each once"
        )
    return list(names)


def is_adapter_run(
    model: nn.Module, sources: Mapping[str, Source], attribute: str | None = None
) -> bool:
    """Check whether only adapters are trained, on a base that can be recreated.

    The adapters are in the submodule `attribute`, or in the model itself if that is None. `sources`
    are the tensors of `model`.
    """
    module: Any = module_at(model, attribute or "")
    if not has_adapters(module) or irreproducible(module.peft_config):
        return False
    view = view_of(model, sources, attribute or "")
    return not missing_trainable(view, adapter_parts(view, "", "", "as_is"))


def _refuse_missing(parts: Iterable[Part], views: Iterable[View], adapter_only: bool) -> None:
    """Raise IncompleteError naming the tensors that would be lost.

    These are the tensors of `views` that no part stores, except:

    - other names of a stored parameter,
    - tensors that the class or PEFT recreates (`Part.omitted`),
    - the frozen tensors of the base, if `adapter_only`.
    """
    explained: set[int] = set()
    for part in parts:
        explained.update(source.key for source in part.omitted)
        for entry in part.entries:
            explained.update(source.key for source in entry.sources)
        if adapter_only:
            explained.update(source.key for source in part.base.values())

    missing = []
    for view in views:
        for name, source in view.sources.items():
            if source.key not in explained:
                missing.append(name)

    if missing:
        raise IncompleteError(
            f"{listing(missing, ', ')}: {len(missing)} tensor(s) of the model would be in no file, "
            "and no rule says why; nothing is written. Please report it"
        )


def _parts_of_view(view: View, name: str, path: str, adapter_only: bool, dtype: str) -> list[Part]:
    """Make the parts of the model or submodule in `view`, in the folder `path`."""
    is_adapted = view.has_adapters
    if is_adapted:
        refuse_merged(view.module)
    if adapter_only:
        reason = irreproducible(view.module.peft_config) if is_adapted else ""
        if reason:
            raise SelectionError(
                f"{reason}: the adapter alone fits no base; save with adapter_only=False"
            )
        adapters = adapter_parts(view, name, path, dtype)
        check_complete(view, adapters)
        return [in_lora_layout(part) for part in adapters]

    if not is_adapted:
        return [model_part(view, name, path, dtype)]
    base = model_part(view.base, name, path, dtype)
    adapters = adapter_parts(view, name, path, dtype, in_folders=True)
    return [base, *(in_lora_layout(part) for part in adapters)]
