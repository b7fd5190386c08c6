"""Turns a save request into parts, one for each loadable folder."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ft_ckpt.errors import IncompleteError, NotAnAdapterError, SelectionError, listing
from ft_ckpt.messages import short
from ft_ckpt.model.adapters import (
    adapter_parts,
    base_view,
    check_complete,
    has_adapters,
    missing_trainable,
)
from ft_ckpt.model.base_model import irreproducible, refuse_merged
from ft_ckpt.model.diffusers import in_lora_layout
from ft_ckpt.model.entries import Part
from ft_ckpt.model.selection import View, model_part, module_at, view_of
from ft_ckpt.ranks import Source

Attribute = str | Sequence[str] | None


def check_model(model: Any) -> None:
    """Raise SelectionError for an object that is no model, with what to pass instead."""
    if isinstance(model, nn.Module):
        return
    kind = model.__name__ if isinstance(model, type) else type(model).__name__
    raise SelectionError(f"model: {kind}, expected a torch.nn.Module; {_right_argument(model)}")


def _right_argument(model: Any) -> str:
    """What to pass instead of an object that is no model."""
    if isinstance(model, type):
        return "pass an instance of the class"
    if isinstance(model, Mapping):
        return (
            "pass the model itself; values that differ from its own go beside it: save(model, "
            "path, state_dict=...)"
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
    inside = [
        name
        for name, value in getattr(model, "__dict__", {}).items()
        if isinstance(value, nn.Module)
    ]
    if inside:
        return f"pass the model that it has as {', '.join(f'.{name}' for name in inside)}"
    if hasattr(model, "save_pretrained"):
        return (
            "pass the model, and a tokenizer or processor beside it: save(model, path, "
            "tokenizer=...)"
        )
    return "pass the model that was trained"


def model_inside(model: nn.Module) -> nn.Module:
    """The model inside torch's AveragedModel (EMA, SWA); any other model is returned unchanged.

    The number of averages is run state, saved if the AveragedModel is registered. Raises
    SelectionError for a pipeline of diffusers.
    """
    _refuse_pipeline(model)
    inside = model.module if isinstance(model, AveragedModel) else model
    return inside if isinstance(inside, nn.Module) else model


def _refuse_pipeline(model: Any) -> None:
    """Raise SelectionError for a pipeline of diffusers, naming the models in it."""
    if isinstance(model, nn.Module) or not isinstance(
        components := getattr(model, "components", None), Mapping
    ):
        return
    models = [
        f"pipeline.{name}" for name, value in components.items() if isinstance(value, nn.Module)
    ]
    if models:
        raise SelectionError(
            f"{type(model).__name__}: a pipeline of several models, expected one of them: "
            f"{', '.join(models)}; pipeline.save_pretrained(...) saves the whole pipeline"
        )


def is_of_adapters(model: nn.Module, adapter_only: bool | None, attribute: Attribute) -> bool:
    """Whether a save stores the adapters alone: `adapter_only`, or False for a model without
    adapters.

    Raises SelectionError if `attribute` is not a name or several; and for a model with adapters if
    `adapter_only` is None, because other readers would load only the base from a folder with both.
    """
    names = _names_of(attribute)
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
    found: Mapping[str, Source],
    *,
    adapter_only: bool,
    attribute: Attribute,
    dtype: str,
    extra: Mapping[str, Any] | None = None,
    merge: Callable[[View], Part] | None = None,
) -> list[Part]:
    """The parts of a save.

    A single attribute is stored in the checkpoint's root, each of a list in its own folder.

    `extra`: non-tensor values of the model's state dict; `merge`: makes the part of the model with
    its adapters merged into the base. Raises SelectionError or a subclass if the request does not
    fit the model, IncompleteError naming tensors that no part stores and no rule omits.
    """
    if attribute is None or isinstance(attribute, str):
        whole = view_of(model, found, attribute or "", extra)
        if merge is not None:
            return _refuse_missing([merge(whole)], [whole], adapter_only)
        return _refuse_missing(
            _parts_of_view(whole, attribute or "", "", adapter_only, dtype), [whole], adapter_only
        )
    views = {name: view_of(model, found, name, extra) for name in _names_of(attribute)}
    if adapter_only and not any(has_adapters(view.module) for view in views.values()):
        raise NotAnAdapterError(
            f"adapter_only=True: none of {', '.join(views)} has a PEFT adapter; use "
            "adapter_only=False"
        )
    parts = [
        part
        # an attribute without adapters, such as a value head, is saved in full
        for name, view in views.items()
        for part in _parts_of_view(
            view, name, name, adapter_only and has_adapters(view.module), dtype
        )
    ]
    return _refuse_missing(parts, views.values(), adapter_only)


def _names_of(attribute: Attribute) -> list[str]:
    if attribute is None:
        return [""]
    names = [attribute] if isinstance(attribute, str) else attribute
    are_names = isinstance(names, Sequence) and all(isinstance(name, str) for name in names)
    if not names or not are_names or len(set(names)) != len(names):
        raise SelectionError(
            f"attribute={short(attribute)}: expected a name, or several in a list, each once"
        )
    return list(names)


def is_adapter_run(
    model: nn.Module, found: Mapping[str, Source], attribute: str | None = None
) -> bool:
    """Whether only adapters are trained, on a base that can be recreated, in the model or its
    `attribute`.

    `found`: the sources of `model`.
    """
    module: Any = module_at(model, attribute or "")
    if not has_adapters(module) or irreproducible(module.peft_config):
        return False
    whole = view_of(model, found, attribute or "")
    return not missing_trainable(whole, adapter_parts(whole, "", "", "as_is"))


def kind_of(adapter_only: bool, attribute: Attribute) -> str:
    """The kind of a save, for the manifest."""
    if attribute is not None:
        return "attribute"
    return "adapter" if adapter_only else "full"


def _refuse_missing(parts: list[Part], views: Iterable[View], adapter_only: bool) -> list[Part]:
    """Check that `parts` store every tensor of `views`, and return them.

    Allowed omissions are other names of one parameter, tensors that the class or PEFT recreates,
    and with `adapter_only` the frozen tensors of the base. Raises IncompleteError naming all other
    missing tensors.
    """
    known = {source.key for part in parts for entry in part.entries for source in entry.sources}
    known |= {source.key for part in parts for source in part.omitted}
    if adapter_only:
        known |= {source.key for part in parts for source in part.base.values()}
    missing = [
        name for view in views for name, source in view.sources.items() if source.key not in known
    ]
    if missing:
        raise IncompleteError(
            f"{listing(missing, ', ')}: {len(missing)} tensor(s) of the model would be in no file, "
            "and no rule says why; nothing is written. Please report it"
        )
    return parts


def _parts_of_view(view: View, name: str, path: str, adapter_only: bool, dtype: str) -> list[Part]:
    if has_adapters(view.module):
        refuse_merged(view.module)
    if (
        adapter_only
        and has_adapters(view.module)
        and (why := irreproducible(view.module.peft_config))
    ):
        raise SelectionError(f"{why}: the adapter alone fits no base; save with adapter_only=False")
    if adapter_only:
        parts = adapter_parts(view, name, path, dtype)
        check_complete(view, parts)
        return [in_lora_layout(part) for part in parts]
    if not has_adapters(view.module):
        return [model_part(view, name, path, dtype)]
    below = adapter_parts(view, name, path, dtype, in_folders=True)
    return [
        model_part(base_view(view), name, path, dtype),
        *(in_lora_layout(part) for part in below),
    ]
