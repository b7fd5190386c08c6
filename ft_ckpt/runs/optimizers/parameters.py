"""Finds the model tensors (sources) that belong to the parameters of an optimizer."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from ft_ckpt.ranks.sharding import Source
from ft_ckpt.ranks.wrappers import optimizer_parameter


def sources_by_parameter(sources: Mapping[str, Source]) -> dict[int, list[Source]]:
    """Return the sources of each parameter, by the `id` of the parameter.

    A parameter has one source. A flat parameter of FSDP1 holds several tensors, so it has several.
    """
    owners: dict[int, list[Source]] = {}
    seen: set[int] = set()
    for source in sources.values():
        if source.key in seen:
            continue  # another name of a tied tensor
        seen.add(source.key)
        owners.setdefault(id(parameter_of(source)), []).append(source)
    return owners


def parameter_of(source: Source) -> Any:
    """Return the object that an optimizer holds for the tensor of `source`."""
    return optimizer_parameter(source.live)


def names_of_groups(
    groups: Iterable[Mapping[str, Any]], sources: Mapping[str, Source]
) -> list[list[str]]:
    """Return the names of the parameters in each group; a tied parameter has its first name."""
    owners = sources_by_parameter(sources)
    names_by_group = []
    for group in groups:
        names: list[str] = []
        for parameter in group["params"]:
            names += [source.name for source in owners.get(id(parameter), [])]
        names_by_group.append(names)
    return names_by_group


def trained_identities(optimizer: Any, sources: Mapping[str, Source]) -> frozenset[int]:
    """Return the keys of the sources whose parameters have state in the optimizer."""
    owners = sources_by_parameter(sources)
    keys: set[int] = set()
    for parameter in stateful_parameters(optimizer):
        keys.update(source.key for source in owners.get(id(parameter), []))
    return frozenset(keys)


def stateful_parameters(optimizer: Any) -> list[Any]:
    """Return the parameters that have state.

    They come in the order of the groups. Parameters that are in no group come last.
    """
    by_id: dict[int, Any] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in optimizer.state:
                by_id[id(parameter)] = parameter
    for key in optimizer.state:
        if isinstance(key, Tensor):
            by_id.setdefault(id(key), key)
    return list(by_id.values())
