"""Turns a request into parts, one for each loadable folder."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim.swa_utils import AveragedModel

from ft_ckpt.distributed.source import Source
from ft_ckpt.errors import IncompleteError, NotAnAdapterError, SelectionError, listing
from ft_ckpt.model.adapters import adapter_parts, base_view, check_complete, has_adapters, missing_trainable
from ft_ckpt.model.base_model import irreproducible, refuse_merged
from ft_ckpt.model.entries import MergeChoice, Part
from ft_ckpt.model.selection import View, model_part, module_at, view_of

Attribute = str | Sequence[str] | None


def model_inside(model: nn.Module) -> nn.Module:
    """The model inside torch's AveragedModel (EMA, SWA); any other model itself.

    The number of averages belongs to the run, which stores it if the AveragedModel is registered.
    """
    inside = model.module if isinstance(model, AveragedModel) else model
    return inside if isinstance(inside, nn.Module) else model


def is_of_adapters(model: nn.Module, adapter_only: bool | None, attribute: Attribute) -> bool:
    """Whether a save stores the adapters alone; False for a model without adapters.

    Raises SelectionError for a model with adapters if `adapter_only` is None, because other readers take a folder with
    the base for the trained model.
    """
    if adapter_only is not None:
        return adapter_only
    names = [attribute] if isinstance(attribute, str) else list(attribute or [""])
    adapted = [name or "the model" for name in names if has_adapters(module_at(model, name))]
    if adapted:
        raise SelectionError(
            f"{', '.join(adapted)}: has PEFT adapters; say what to save: adapter_only=True, the adapters alone, which "
            "go onto their base; or adapter_only=False, the base and its adapters side by side, which only "
            "ft_ckpt.load_model puts together"
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
    merged: MergeChoice | None = None,
) -> list[Part]:
    """The parts of a save. A single attribute goes to the checkpoint's own folder, a list to a folder each.

    `extra`: non-tensor values of the model's state dict; `merged`: adapters to merge into the base. Raises
    SelectionError or a subclass if the model lacks what was requested, IncompleteError naming tensors that
    would be left out without a rule.
    """
    if attribute is None or isinstance(attribute, str):
        whole = view_of(model, found, attribute or "", extra)
        if merged is not None:
            from ft_ckpt.model.merge import merged_part  # here: it needs PEFT, which is slow to import

            return _refuse_missing([merged_part(whole, "", dtype, merged)], [whole], adapter_only)
        return _refuse_missing(_parts_of_view(whole, attribute or "", "", adapter_only, dtype), [whole], adapter_only)
    if not attribute or len(set(attribute)) != len(attribute):
        raise SelectionError(f"attribute={list(attribute)!r}: expected one or more names, each once")
    views = {name: view_of(model, found, name, extra) for name in attribute}
    if adapter_only and not any(has_adapters(view.module) for view in views.values()):
        raise NotAnAdapterError(
            f"adapter_only=True: none of {', '.join(views)} has a PEFT adapter; use adapter_only=False"
        )
    parts = [
        part
        for name, view in views.items()  # beside an adapter a plain attribute, such as a value head, is saved in full
        for part in _parts_of_view(view, name, name, adapter_only and has_adapters(view.module), dtype)
    ]
    return _refuse_missing(parts, views.values(), adapter_only)


def is_adapter_run(model: nn.Module, found: Mapping[str, Source], attribute: str | None = None) -> bool:
    """Whether only adapters are trained, on a base that can be recreated, in the model or its `attribute`.

    `found` are the sources of `model`.
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
    """The `parts`, after a check that they contain every tensor of the `views`.

    Allowed omissions are other names of one parameter, tensors that the class or PEFT recreates, and with
    `adapter_only` the frozen tensors of the base. Raises IncompleteError naming all others.
    """
    known = {source.key for part in parts for entry in part.entries for source in entry.sources}
    known |= {source.key for part in parts for source in part.omitted}
    if adapter_only:
        known |= {source.key for part in parts for source in part.base.values()}
    missing = [name for view in views for name, source in view.sources.items() if source.key not in known]
    if missing:
        raise IncompleteError(
            f"{listing(missing, ', ')}: {len(missing)} tensor(s) of the model would be in no file, and no rule says "
            "why; nothing is written. Please report it"
        )
    return parts


def _parts_of_view(view: View, name: str, path: str, adapter_only: bool, dtype: str) -> list[Part]:
    if has_adapters(view.module):
        refuse_merged(view.module)
    if adapter_only and has_adapters(view.module) and (why := irreproducible(view.module.peft_config)):
        raise SelectionError(f"{why}: the adapter alone fits no base; save with adapter_only=False")
    if adapter_only:
        parts = adapter_parts(view, name, path, dtype)
        check_complete(view, parts)
        return parts
    if not has_adapters(view.module):
        return [model_part(view, name, path, dtype)]
    below = adapter_parts(view, name, path, dtype, in_folders=True)
    return [model_part(base_view(view), name, path, dtype), *below]
