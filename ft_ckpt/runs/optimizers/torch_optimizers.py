"""Describes and restores the state of torch optimizers by the names of parameters.

1. `describe` describes the state on this rank.
2. `merge_descriptions` merges the descriptions of all ranks.
3. `state_tensors` returns the tensors as sources, sharded like their parameters.
4. `restore` makes the state again. The order of the parameters, the number of ranks and the wrapper
   of the model may differ from those of the save.
"""

from collections.abc import Callable, Mapping, ValuesView
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ft_ckpt.errors import SelectionError, listing
from ft_ckpt.formats import dtype_of
from ft_ckpt.formats.trees import decode_value
from ft_ckpt.ranks.sharding import Source
from ft_ckpt.ranks.wrappers import is_distributed, shows_runs
from ft_ckpt.runs.optimizers.entries import (
    empty_state_tensor,
    entry_source,
    has_shape_of,
    state_entry,
)
from ft_ckpt.runs.optimizers.groups import (
    check_group_settings,
    match_groups,
    set_groups,
    settings_of,
    unsaveable_settings,
)
from ft_ckpt.runs.optimizers.kinds import Description, OptimizerKind
from ft_ckpt.runs.optimizers.parameters import (
    names_of_groups,
    parameter_of,
    sources_by_parameter,
    stateful_parameters,
)
from ft_ckpt.runs.optimizers.values import (
    build_value,
    pack,
    tensors_of_entry,
    tensors_of_value,
    unpack,
)

_STATE_DICT_KEYS = ("state", "param_groups")
_BESIDE = "state under keys that are not parameters"


class TorchOptimizers(OptimizerKind):
    """Optimizers of torch, and subclasses that keep `param_groups` and `state` as torch does."""

    def recognizes(self, optimizer: Any) -> bool:
        return isinstance(optimizer, Optimizer)

    def describe(self, optimizer: Any, sources: Mapping[str, Source]) -> Description:
        """Describe the state as `OptimizerKind.describe` does.

        `requires_grad` of the `sources` does not matter. Raises SelectionError naming what cannot
        be saved: tensor subclasses, Python objects, parameters of unknown models, and other keys of
        the state dict than "state" and "param_groups".
        """
        owners = sources_by_parameter(sources)
        problems = self.unsaveable_state(optimizer)
        groups, group_problems = _describe_groups(optimizer, owners, bool(problems))
        problems += group_problems
        state, state_problems = _describe_state(optimizer, owners)
        problems += state_problems
        if problems:
            raise SelectionError(
                f"{type(optimizer).__name__}: {listing(problems)}: cannot be saved, so a run could "
                "not be resumed exactly; use an optimizer whose state is tensors, numbers and "
                "containers of them, or save without its state"
            )

        description: Description = {
            "class": type(optimizer).__name__,
            "groups": groups,
            "state": state,
        }
        other_state = _other_state(optimizer)
        if other_state:
            description["beside"] = pack(other_state, _BESIDE)
        return description

    def state_tensors(
        self, optimizer: Any, description: Description, sources: Mapping[str, Source]
    ) -> dict[str, Source]:
        tensors: dict[str, Source] = {}
        missing: list[str] = []
        for name, entries in description["state"].items():
            owner = sources[name]
            state = optimizer.state.get(parameter_of(owner), {})
            is_sharded = shows_runs(owner.live) or is_distributed(owner.live)
            has_elements = is_sharded and owner.local is not None and owner.local.numel() > 0
            for key, entry in entries.items():
                leaves = tensors_of_entry(key, entry)
                live: list[Any] = [None] * len(leaves)
                if key in state:
                    live = tensors_of_value(state[key])
                for (label, leaf), tensor in zip(leaves, live, strict=True):
                    if tensor is None and has_elements and has_shape_of(leaf, owner):
                        missing.append(f"{name}: {label}")
                    if f"{name}/{label}" in tensors:
                        raise SelectionError(
                            f"{name}/{label}: the name of two tensors; rename a key of the state"
                        )
                    tensors[f"{name}/{label}"] = entry_source(owner, label, leaf, tensor)

        refuse_missing_state(optimizer, missing)
        return tensors

    def check(
        self, optimizer: Any, description: Description, sources: Mapping[str, Source]
    ) -> None:
        names = names_of_groups(optimizer.param_groups, sources)
        groups, _ = match_groups(optimizer.param_groups, names, description, sources)
        check_group_settings(groups)

    def restore(
        self,
        optimizer: Any,
        description: Description,
        sources: Mapping[str, Source],
        fill: Callable[[Source], Any],
        later: Callable[[Source], Any] | None = None,
    ) -> tuple[str, ...]:
        """Restore the state as `OptimizerKind.restore` does. All sources may be filled `later`.

        State is found by the names of parameters, and groups by the names in them. State that is
        not described is dropped, so that nothing of later steps remains.
        """
        if later is not None:
            fill = later
        names = names_of_groups(optimizer.param_groups, sources)
        groups, notes = match_groups(optimizer.param_groups, names, description, sources)
        state = _restored_state(description, sources, fill)
        other_state: dict[Any, Any] = {}
        if "beside" in description:
            other_state = unpack(description["beside"])
        optimizer.state.clear()
        optimizer.state.update({**state, **other_state})

        # A run under ZeRO has stored master weights, which are more exact than half-precision ones.
        for name, dtype in description.get("masters", {}).items():
            if sources[name].dtype == dtype_of(dtype):
                fill(replace(sources[name], name=f"{name}/master"))

        set_groups(groups)
        described: set[str] = set()
        for group in description["groups"]:
            described.update(group["params"])
        missing = described - set(description["state"])
        if missing and description["state"]:
            notes.append(f"{len(missing)} parameter(s) had no state when saved")
        return tuple(notes)

    def unsaveable_state(self, optimizer: Any) -> list[str]:
        problems = []
        if isinstance(optimizer, torch.optim.LBFGS):
            problems.append("its state belongs to all parameters together")
        for name in _inner_optimizers(optimizer):
            problems.append(
                f"its {name!r} is an optimizer with state of its own; register that one in its "
                "place, or give both one `state`"
            )

        if not problems and type(optimizer).state_dict is not Optimizer.state_dict:
            other_keys = [key for key in optimizer.state_dict() if key not in _STATE_DICT_KEYS]
            problems += [f"its state dict has {key!r} too" for key in other_keys]

        try:
            pack(_other_state(optimizer), _BESIDE)
        except SelectionError as error:
            problems.append(str(error))

        for number, group in enumerate(optimizer.param_groups):
            problems += unsaveable_settings(number, group)
        return problems


def refuse_missing_state(optimizer: Any, missing: list[str]) -> None:
    """Raise SelectionError naming the state that this rank lacks, if any."""
    if missing:
        raise SelectionError(
            f"{type(optimizer).__name__}: {listing(missing)}: other ranks have this state for "
            "their parts of the parameters, this rank has not, so a part would be lost; step on "
            "all ranks, or save without the optimizer's state"
        )


def is_schedule_free_in_training(optimizer: Any) -> bool:
    """Check whether a schedule-free optimizer is in train mode.

    In train mode the weights are those at which gradients are computed. In eval mode they are the
    average that the model is evaluated by. Such optimizers have methods `train` and `eval`, and the
    mode is in their groups or in an attribute.
    """
    switches = [getattr(optimizer, name, None) for name in ("train", "eval")]
    if not all(callable(switch) for switch in switches):
        return False
    modes = [group.get("train_mode", False) for group in optimizer.param_groups]
    return True in modes or getattr(optimizer, "train_mode", False) is True


def _describe_groups(
    optimizer: Any, owners: Mapping[int, list[Source]], has_problems: bool
) -> tuple[list[Description], list[str]]:
    """Return the descriptions of the groups, and their problems.

    The settings are left out if there are problems.
    """
    groups: list[Description] = []
    problems: list[str] = []
    for number, group in enumerate(optimizer.param_groups):
        names: list[str] = []
        for position, parameter in enumerate(group["params"]):
            sources = owners.get(id(parameter), [])
            names += [source.name for source in sources]
            if not sources:
                problems.append(f"parameter {position} of group {number}: of no known model")
        values = {} if has_problems or problems else settings_of(group)
        groups.append({"params": names, "values": values})
    return groups, problems


def _describe_state(
    optimizer: Any, owners: Mapping[int, list[Source]]
) -> tuple[Description, list[str]]:
    """Return the entries of each parameter's state by its name, and what cannot be saved."""
    state: Description = {}
    problems: list[str] = []
    for parameter in stateful_parameters(optimizer):
        sources = owners.get(id(parameter), [])
        if not sources:
            shape = list(parameter.shape)
            problems.append(f"state of a tensor of shape {shape}: of no known model")
        for source in sources:
            state[source.name] = {}
        for key, value in optimizer.state[parameter].items():
            for source in sources:
                entry, reasons = state_entry(key, value, parameter, source)
                problems += [f"{source.name}: {reason}" for reason in reasons]
                state[source.name][key] = entry

    return state, problems


def _restored_state(
    description: Description, sources: Mapping[str, Source], fill: Callable[[Source], Any]
) -> dict[Any, dict[str, Any]]:
    """Make the described state, by parameter. `fill` reads the elements of each new tensor."""
    by_parameter: dict[Any, dict[str, Any]] = {}
    for name, entries in description["state"].items():
        owner = sources[name]
        parameter = parameter_of(owner)

        # The tensors in an FSDP1 flat parameter share one state.
        state = by_parameter.setdefault(parameter, {})
        for key, entry in entries.items():
            if "value" in entry:
                state[key] = decode_value(entry["value"])
                continue
            leaves = tensors_of_entry(key, entry)
            if key not in state:
                empty = [empty_state_tensor(leaf, parameter, owner) for _, leaf in leaves]
                state[key] = build_value(entry, empty)
            for (label, leaf), tensor in zip(leaves, tensors_of_value(state[key]), strict=True):
                fill(entry_source(owner, label, leaf, tensor))

    return by_parameter


def _inner_optimizers(optimizer: Any) -> list[str]:
    """Return the names of attributes that are or contain other optimizers with separate state."""
    names = []
    for name, value in vars(optimizer).items():
        if name in _STATE_DICT_KEYS:
            continue
        members = value.values() if isinstance(value, Mapping) else value
        if not isinstance(members, (list, tuple, ValuesView)):
            members = [members]
        inner = [member for member in members if isinstance(member, Optimizer)]
        if any(member.state is not optimizer.state for member in inner):
            names.append(name)
    return names


def _other_state(optimizer: Any) -> dict[Any, Any]:
    """Return state under keys that are not parameters."""
    return {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
