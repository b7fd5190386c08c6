"""Finds and prepares modules of FSDP2, which wraps no module but replaces classes of modules."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ft_ckpt.errors import listing
from ft_ckpt.messages import warn
from ft_ckpt.ranks.wrappers.wrapper import Wrapper


class FSDP2Wrapper(Wrapper):
    """FSDP2, and attributes that other composable APIs of torch set on modules."""

    packages = ("torch.distributed.",)
    attribute_prefixes = ("_fsdp_", "_is_fsdp_", "__composable")

    def reshard_modules(self, modules: Sequence[nn.Module]) -> None:
        # After a forward, the outermost parameters stay gathered: copies in the compute dtype,
        # which is less precise.
        for module in _fsdp_modules(modules):
            module.reshard()
        _warn_of_copies(modules)

    def user_class(self, cls: type) -> type:
        return next(base for base in cls.__mro__ if not issubclass(base, FSDPModule))

    def pending_gradients(self, modules: Sequence[nn.Module]) -> Mapping[str, "PendingGradient"]:
        records = _parameter_records(_parameter_groups(modules))
        if not records:
            return {}
        names = {id(parameter): name for name, parameter in modules[0].named_parameters()}
        gradients = {}
        for record in records:
            name = names.get(id(record.sharded_param))
            if name is not None:
                gradients[name] = PendingGradient(record)
        return gradients


def _fsdp_modules(modules: Sequence[nn.Module]) -> list[FSDPModule]:
    return [module for module in modules if isinstance(module, FSDPModule)]


def _parameter_groups(modules: Sequence[nn.Module]) -> list[Any]:
    """Return FSDP2's groups of parameters that are gathered together."""
    groups: list[Any] = []
    for module in _fsdp_modules(modules):
        state: Any = module._get_fsdp_state()
        groups += getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group]


def _parameter_records(groups: Sequence[Any]) -> list[Any]:
    records: list[Any] = []
    for group in groups:
        records += group.fsdp_params
    return records


def _warn_of_copies(modules: Sequence[nn.Module]) -> None:
    """Warn of tied parameters of which FSDP2 has two copies, and the optimizer trains one.

    If shards are padded, because the number of ranks does not divide the rows, torch copies a tied
    parameter for each module that it shards. The second copy is not trained and is in no state
    dict.
    """
    # Before the first forward, FSDP2 has yet to refresh its copies.
    groups = _parameter_groups(modules)
    refreshed = [group for group in groups if getattr(group, "_reset_sharded_params", False)]
    records = _parameter_records(refreshed)
    counts = Counter(id(record.sharded_param) for record in records)
    stale = set()
    for record in records:
        key = id(record.sharded_param)
        if counts[key] > 1 and not _is_current(record):
            stale.add(key)

    if stale:
        named = modules[0].named_parameters(remove_duplicate=False)
        names = [name for name, parameter in named if id(parameter) in stale]
        warn(
            f"{listing(names, ', ')}: tied, but FSDP2 computes with another copy that is not "
            "trained and not saved; let the rows divide by the ranks "
            "(resize_token_embeddings(pad_to_multiple_of=...)), or untie them",
        )


def _is_current(record: Any) -> bool:
    """Check whether FSDP2's copy of the shard has the values of the parameter."""
    gathered, local = record._sharded_param_data, record.sharded_param._local_tensor
    return gathered.data_ptr() == local.data_ptr() or torch.equal(
        gathered[: local.numel()], local.reshape(-1)
    )


@dataclass(frozen=True)
class PendingGradient:
    """The gradient of a whole parameter that FSDP2 has not yet reduced over the ranks."""

    record: Any  # FSDP2's record of the parameter

    def read(self) -> Tensor | None:
        # the sum of earlier backward passes, or the gradient of the last one
        pending: Tensor | None = getattr(self.record, "unsharded_accumulated_grad", None)
        whole = getattr(self.record, "_unsharded_param", None)
        return whole.grad if pending is None and whole is not None else pending

    def write(self, gradient: Tensor | None) -> None:
        self.record.unsharded_accumulated_grad = gradient
        if getattr(self.record, "_unsharded_param", None) is not None:
            self.record._unsharded_param.grad = None
