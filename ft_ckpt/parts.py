"""What the caller asked for, as parts: one for each folder that something can load."""

from collections.abc import Mapping, Sequence

from torch import nn

from ft_ckpt.adapters import adapter_parts, base_view, check_complete, has_adapters, missing_trainable
from ft_ckpt.engines import Source, sources, unwrap
from ft_ckpt.errors import NotAnAdapterError, SelectionError
from ft_ckpt.select import Part, View, model_part, view

Attribute = str | Sequence[str] | None


def parts_of(
    model: nn.Module, found: Mapping[str, Source], *, adapter_only: bool, attribute: Attribute, dtype: str
) -> list[Part]:
    """The parts of a save. A single attribute goes to the checkpoint's own folder, a list to a folder each.

    Raises SelectionError and its kin when the model does not have what was asked for, IncompleteError when tensors
    that were trained would be left out.
    """
    if attribute is None or isinstance(attribute, str):
        return _parts(view(model, found, attribute or ""), attribute or "", "", adapter_only, dtype)
    if not attribute or len(set(attribute)) != len(attribute):
        raise SelectionError(f"attribute={list(attribute)!r}: expected one or more names, each once")
    views = {name: view(model, found, name) for name in attribute}
    if adapter_only and not any(has_adapters(one.module) for one in views.values()):
        raise NotAnAdapterError(
            f"adapter_only=True: none of {', '.join(views)} has a PEFT adapter; use adapter_only=False"
        )
    return [
        part
        for name, one in views.items()  # beside an adapter a plain attribute, such as a value head, is saved in full
        for part in _parts(one, name, name, adapter_only and has_adapters(one.module), dtype)
    ]


def is_adapter_run(model: nn.Module) -> bool:
    """Whether adapters are all that is trained."""
    if not has_adapters(unwrap(model)):
        return False
    whole = view(model, sources(model))
    return not missing_trainable(whole, adapter_parts(whole, "", "", "as_is"))


def kind_of(adapter_only: bool, attribute: Attribute) -> str:
    """The kind of a save, for the manifest."""
    if attribute is not None:
        return "attribute"
    return "adapter" if adapter_only else "full"


def _parts(one: View, name: str, path: str, adapter_only: bool, dtype: str) -> list[Part]:
    if adapter_only:
        parts = adapter_parts(one, name, path, dtype)
        check_complete(one, parts)
        return parts
    if not has_adapters(one.module):
        return [model_part(one, name, path, dtype)]
    below = adapter_parts(one, name, path, dtype, in_folders=True)
    return [model_part(base_view(one), name, path, dtype), *below]
