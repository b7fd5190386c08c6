"""Views: a module of the live model with its tensors, under names relative to the module.

The view of a model with adapters also gives the view of the base in it, with the names that the
tensors had before the adapters were added.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from ft_ckpt.errors import IncompleteError, SelectionError, UnknownAttributeError
from ft_ckpt.messages import did_you_mean
from ft_ckpt.model.tensors.peft_paths import (
    active_adapters,
    entries_of_base,
    has_adapters,
    model_below,
    root_steps,
)
from ft_ckpt.ranks.sharding import Source
from ft_ckpt.ranks.wrappers import unwrap


@dataclass(frozen=True, eq=False)
class View:
    """Module of the live model with its tensors.

    Attributes:
        module: an nn.Module of any class, without wrappers.
        sources: its tensors, by name in the module.
        extra: the non-tensor values of its state dict, by name in the module.
    """

    module: Any
    sources: Mapping[str, Source] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_adapters(self) -> bool:
        return has_adapters(self.module)

    @property
    def active_adapters(self) -> list[str]:
        """Names of the active adapters."""
        return active_adapters(self.module)

    @property
    def base(self) -> "View":
        """View of the base model, with the names from before the adapters were added."""
        extra = dict(entries_of_base(self.module, self.extra))
        return View(model_below(self.module), dict(self.base_sources()), extra)

    def base_sources(self) -> Iterator[tuple[str, Source]]:
        """Yield the tensors of the base model, each with its name in the base model."""
        return entries_of_base(self.module, self.sources)

    def path_in_base(self, path: str) -> str:
        """Return the path in the base model of a module that is in no PEFT layer."""
        return ".".join(path.split(".")[len(root_steps(self.module)) :])


def view_of(
    model: nn.Module,
    sources: Mapping[str, Source],
    attribute: str = "",
    extra: Mapping[str, Any] | None = None,
) -> View:
    """Return the view of the model, or of its submodule at the dotted path `attribute`.

    `sources` and `extra` are those of the whole model. Raises UnknownAttributeError naming the
    existing submodules, SelectionError when the attribute is not a module, IncompleteError when it
    has no tensors.
    """
    module = module_at(model, attribute)
    prefix = f"{attribute}." if attribute else ""
    depth = len(attribute.split(".")) if attribute else 0
    view_sources = {}
    for name, source in sources.items():
        if name.startswith(prefix):
            view_sources[name.removeprefix(prefix)] = _with_raw_below(source, depth)

    if not view_sources:
        raise IncompleteError(
            f"{attribute or type(module).__name__}: no tensors to save; nothing is written"
        )

    view_extra = {}
    for name, value in (extra or {}).items():
        if name.startswith(prefix):
            view_extra[name.removeprefix(prefix)] = value

    return View(module, view_sources, view_extra)


def module_at(model: nn.Module, attribute: str) -> nn.Module:
    """Return the model, or its submodule at the dotted path `attribute`, without wrappers.

    Raises UnknownAttributeError and SelectionError as `view_of`.
    """
    module = unwrap(model)
    for step in attribute.split(".") if attribute else []:
        if step not in module._modules and not hasattr(module, step):
            names = sorted(name for name, child in module.named_children() if child is not None)
            submodules = ", ".join(names) or "no submodules"
            hint = did_you_mean([step], names) or f"it has {submodules}"
            raise UnknownAttributeError(
                f"attribute {attribute!r}: {type(module).__name__} has no {step!r}; {hint}"
            )
        inner = getattr(module, step)
        if not isinstance(inner, nn.Module):
            raise SelectionError(
                f"attribute {attribute!r}: {step!r} is a {type(inner).__name__}, expected a module"
            )
        module = unwrap(inner)

    return module


def _with_raw_below(source: Source, depth: int) -> Source:
    """Return the source with a raw name that is relative to a submodule.

    The submodule is `depth` attributes below the model, and is taken without wrappers. A raw name
    has steps of wrappers, which `source.name` lacks. For example, for depth 1 the raw name
    "module.policy._fsdp_wrapped_module.lm_head.weight" becomes "lm_head.weight".
    """
    if not depth and source.raw_name == source.name:
        return source
    steps = source.raw_name.split(".")
    names = source.name.split(".")
    attributes = names[:depth]
    first_below = names[depth]
    # Steps of wrappers between the attributes, and after the last one, are removed as well.
    while attributes or steps[0] != first_below:
        step = steps.pop(0)
        if attributes and step == attributes[0]:
            attributes.pop(0)
    raw_name = ".".join(steps)
    return source if raw_name == source.raw_name else replace(source, raw_name=raw_name)
