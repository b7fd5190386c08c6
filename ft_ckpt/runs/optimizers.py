"""The state of torch optimizers by parameter name, and its restoration.

`describe` describes this rank's state, and `state.merge_descriptions` merges the descriptions of
all ranks; `state_tensors` gives the tensors as sources, sharded like their parameters; `restore`
creates the state again, for any order of parameters, number of ranks or wrapper at the save.
`zero_optimizer` has the same functions for DeepSpeed's optimizers; `items` chooses between the two.
No tensor moves between ranks here.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, ValuesView
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ft_ckpt.errors import LoadError, SelectionError, listing
from ft_ckpt.formats import PLAIN, decode_value, dtype_name, dtype_of, encode_node
from ft_ckpt.ranks import (
    OwnedSharding,
    Sharding,
    Source,
    held_source,
    is_distributed,
    optimizer_parameter,
    shows_runs,
    source_of_tensor,
    state_run,
)
from ft_ckpt.runs.optimizer_values import (
    Entry,
    build_value,
    decode_setting,
    encode_if_plain,
    encode_setting,
    flatten_container,
    is_dense,
    pack,
    set_setting,
    tensors_of_entry,
    tensors_of_value,
    unpack,
)

# {"class": str, "groups": [{"params": [names], ...}], "state": {name: {key: entry}}}
Description = dict[str, Any]

_BESIDE = "state under keys that are not parameters"
# a live group, and the values described for it
GroupValues = tuple[dict[str, Any], Mapping[str, Any]]


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group without its parameters, by key.

    Raises SelectionError for one that cannot be saved.
    """
    return {key: encode_setting(key, value) for key, value in group.items() if key != "params"}


def match_groups(
    groups: Sequence[dict[str, Any]],
    live: Sequence[Collection[str]],
    description: Mapping[str, Any],
    found: Mapping[str, Source],
) -> tuple[list[GroupValues], list[str]]:
    """Match live groups with described ones. Returns each group with its described values, and
    notes.

    `live` has the parameter names of each group. Groups are compared by position and by all names
    in them. ZeRO drops frozen parameters: those without state may be on one side only while they
    are frozen. Raises LoadError for any other difference.
    """
    first: dict[int, str] = {}
    canonical = {name: first.setdefault(source.key, name) for name, source in found.items()}
    stored = [
        {canonical.get(name, name) for name in group["params"]} for group in description["groups"]
    ]
    with_state = {canonical.get(name, name) for name in description["state"]}
    live_names, stored_names = (
        {name for names in live for name in names},
        {name for names in stored for name in names},
    )
    problems = _group_differences(live_names, stored_names, with_state, found)
    ours, theirs = (
        [live_names & stored_names & set(names) for names in live],
        [names & live_names for names in stored],
    )
    places = {frozenset(names): place for place, names in enumerate(theirs) if names}
    pairs: list[GroupValues] = []
    notes: list[str] = []
    for number, (group, names) in enumerate(zip(groups, ours, strict=True)):
        place = number if ours == theirs else places.get(frozenset(names))
        if place is not None:
            pairs.append((group, description["groups"][place]["values"]))
        elif not names:
            notes.append(
                f"parameter group {number} shares no parameter with the "
                "checkpoint: its settings stay"
            )
        elif not problems:
            problems.append(
                f"parameter group {number}: its {len(names)} parameters are not "
                "one group in the checkpoint"
            )
    if problems:
        raise LoadError(
            f"{listing(problems)}; resume with the model and parameter groups of the saved run"
        )
    return pairs, notes


def check_settings(groups: Iterable[GroupValues]) -> None:
    """Raise LoadError for described values whose type differs from the live group's."""
    problems: list[str] = []
    for group, values in groups:
        for key, stored in values.items():
            value = decode_setting(stored, "cpu")
            if key in group and not _can_replace(key, value, group[key]):
                problems.append(f"{key}: {value!r:.60} in the checkpoint, {group[key]!r:.60} here")
    if problems:
        raise LoadError(f"{listing(problems)}; resume with the optimizer of the saved run")


def _can_replace(key: str, value: Any, live: Any) -> bool:
    """Whether a stored setting may replace a live one: both of one type, or one None, except for
    "lr".
    """
    if value is None or live is None:
        return value is live or key != "lr"
    if isinstance(live, tuple):
        same = isinstance(value, (tuple, list)) and len(value) == len(live)
        return same and all(_can_replace(key, *pair) for pair in zip(value, live, strict=True))
    return _kind_of_setting(value) == _kind_of_setting(live)


def _kind_of_setting(value: Any) -> str:
    if isinstance(value, Tensor):
        return "bool" if value.dtype == torch.bool else "number"
    if isinstance(value, (bool, np.bool_)):
        return "bool"
    return "number" if isinstance(value, (int, float, np.number)) else type(value).__name__


def set_groups(groups: Iterable[GroupValues]) -> None:
    """Set the described values of each group."""
    for group, values in groups:
        for key, value in values.items():
            set_setting(group, key, value)


def _group_differences(
    live: set[str], stored: set[str], with_state: set[str], found: Mapping[str, Source]
) -> list[str]:
    """The parameters that only one side trains."""
    only_here = [name for name in live - stored if found[name].trainable or name in with_state]
    lost = [name for name in (stored | with_state) - live if name not in found]
    only_there = [
        name
        for name in stored - live
        if name in found and (found[name].trainable or name in with_state)
    ]
    return [
        *(f"{name}: trained here, not in the checkpoint's optimizer" for name in sorted(only_here)),
        *(
            f"{name}: in the checkpoint's optimizer, not trained here"
            for name in sorted([*lost, *only_there])
        ),
    ]


def unwrap_optimizer(optimizer: Any) -> Any:
    """The optimizer inside Accelerate's wrapper, if there is one."""
    while type(optimizer).__module__.startswith("accelerate.") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def describe(optimizer: Any, found: Mapping[str, Source]) -> Description:
    """This rank's part of the optimizer's state as JSON: plain values, and shape and dtype of
    tensors.

    `found` are the sources of the models it trains; their `requires_grad` does not matter. Raises
    SelectionError naming what cannot be saved: tensor subclasses, Python objects, parameters of
    unknown models, further entries of its state dict.
    """
    owners, problems = sources_by_parameter(found), unsaveable_state(optimizer)
    groups: list[Description] = []
    for number, group in enumerate(optimizer.param_groups):
        names = [[source.name for source in owners.get(id(p), [])] for p in group["params"]]
        problems += [
            f"parameter {i} of group {number}: of no known model"
            for i, n in enumerate(names)
            if not n
        ]
        groups.append(
            {"params": list(chain(*names)), "values": {} if problems else settings_of(group)}
        )
    state: Description = {}
    for parameter in _stateful_parameters(optimizer):
        if id(parameter) not in owners:
            problems.append(
                f"state of a tensor of shape {list(parameter.shape)}: of no known model"
            )
        sources = owners.get(id(parameter), [])
        for source in sources:
            state[source.name] = {}
        for key, value in optimizer.state[parameter].items():
            for source in sources:
                entry, refused = _state_entry(key, value, parameter, source)
                problems += [f"{source.name}: {problem}" for problem in refused]
                state[source.name][key] = entry
    if problems:
        raise SelectionError(
            f"{type(optimizer).__name__}: {listing(problems)}: cannot be saved, so a run could not "
            "be resumed exactly; use an optimizer whose state is tensors, numbers and containers "
            "of them, or save without its state"
        )
    described = {"class": type(optimizer).__name__, "groups": groups, "state": state}
    return described | (
        {"beside": pack(beside, _BESIDE)} if (beside := _other_state(optimizer)) else {}
    )


def unsaveable_state(optimizer: Any) -> list[str]:
    """The reasons why the optimizer's state can never be saved; known before its first step."""
    problems = []
    if isinstance(optimizer, torch.optim.LBFGS):
        problems.append("its state belongs to all parameters together")
    problems += [
        (
            f"its {name!r} is an optimizer with state of its own; register that one in its "
            "place, or give both one `state`"
        )
        for name in _inner_optimizers(optimizer)
    ]
    if not problems and type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
        further = [key for key in optimizer.state_dict() if key not in ("state", "param_groups")]
        problems += [f"its state dict has {key!r} too" for key in further]
    try:
        pack(_other_state(optimizer), _BESIDE)
    except SelectionError as error:
        problems.append(str(error))
    for number, group in enumerate(optimizer.param_groups):
        problems += _unsaveable_settings(number, group)
    return problems


def _unsaveable_settings(number: int, group: Mapping[str, Any]) -> list[str]:
    problems: list[str] = []
    for key, value in group.items():
        if key == "params":
            continue
        try:
            encode_setting(key, value)
        except SelectionError as error:
            problems.append(f"group {number}: {error}")
    return problems


def is_schedule_free_in_training(optimizer: Any) -> bool:
    """Whether the optimizer has put the weights to the point where gradients are computed, instead
    of its average.

    Schedule-free optimizers switch by `train` and `eval`, and have the mode in their groups, or as
    an attribute.
    """
    if not (
        callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))
    ):
        return False
    modes = [group.get("train_mode", False) for group in optimizer.param_groups]
    return True in modes or getattr(optimizer, "train_mode", False) is True


def _inner_optimizers(optimizer: Any) -> list[str]:
    """The attributes that are or contain other optimizers with separate state."""
    own = {
        name: value
        for name, value in vars(optimizer).items()
        if name not in ("state", "param_groups")
    }
    held = {
        name: value.values() if isinstance(value, Mapping) else value for name, value in own.items()
    }
    held = {
        name: value if isinstance(value, (list, tuple, ValuesView)) else [value]
        for name, value in held.items()
    }
    return [
        name
        for name, values in held.items()
        if any(
            isinstance(one, torch.optim.Optimizer) and one.state is not optimizer.state
            for one in values
        )
    ]


def state_tensors(
    optimizer: Any, description: Description, found: Mapping[str, Source]
) -> dict[str, Source]:
    """The tensors of the described state as sources, by "parameter/key"; the same names on every
    rank.

    Raises SelectionError naming state that this rank lacks for its parts of parameters, and other
    ranks have.
    """
    sources, missing = {}, []
    for name, entries in description["state"].items():
        owner = found[name]
        state = optimizer.state.get(parameter_of(owner), {})
        is_cut = shows_runs(owner.live) or is_distributed(owner.live)
        is_held = is_cut and owner.local is not None and owner.local.numel() > 0
        for key, entry in entries.items():
            tensors = tensors_of_entry(key, entry)
            live = tensors_of_value(state[key]) if key in state else [None] * len(tensors)
            for (label, leaf), tensor in zip(tensors, live, strict=True):
                if tensor is None and is_held and _has_shape_of(leaf, owner):
                    missing.append(f"{name}: {label}")
                if f"{name}/{label}" in sources:
                    raise SelectionError(
                        f"{name}/{label}: the name of two tensors; rename a key of the state"
                    )
                sources[f"{name}/{label}"] = _entry_source(owner, label, leaf, tensor)
    refuse_missing_state(optimizer, missing)
    return sources


def refuse_missing_state(optimizer: Any, missing: list[str]) -> None:
    """Raise SelectionError naming the state that this rank lacks, if any."""
    if missing:
        raise SelectionError(
            f"{type(optimizer).__name__}: {listing(missing)}: other ranks have this state for "
            "their parts of the parameters, this rank has not, so a part would be lost; step on "
            "all ranks, or save without the optimizer's state"
        )


def check(optimizer: Any, description: Description, found: Mapping[str, Source]) -> None:
    """Raise LoadError if parameters, groups or settings differ from the description.

    Changes nothing.
    """
    check_settings(
        match_groups(optimizer.param_groups, names_of(optimizer, found), description, found)[0]
    )


def restore(
    optimizer: Any,
    description: Description,
    found: Mapping[str, Source],
    fill: Callable[[Source], Any],
    later: Callable[[Source], Any] | None = None,
) -> tuple[str, ...]:
    """Set the described state; `fill` reads this rank's elements of a source. Returns notes.

    `later`, if given, collects sources to be filled together after the return; here all of them can
    wait.

    State is matched by name, groups by the names in them; state that is not described is dropped,
    so that nothing of later steps is left. Raises LoadError for parameters or groups on one side
    only.
    """
    fill = later or fill
    groups, notes = match_groups(
        optimizer.param_groups, names_of(optimizer, found), description, found
    )
    fresh: dict[Any, dict[str, Any]] = {}
    for name, entries in description["state"].items():
        parameter = parameter_of(found[name])
        state = fresh.setdefault(parameter, {})
        for key, entry in entries.items():
            if "value" in entry:
                state[key] = decode_value(entry["value"])
                continue
            tensors = tensors_of_entry(key, entry)
            if key not in state:
                empty = [_empty_state_tensor(leaf, parameter, found[name]) for _, leaf in tensors]
                state[key] = build_value(entry, empty)
            for (label, leaf), tensor in zip(tensors, tensors_of_value(state[key]), strict=True):
                fill(_entry_source(found[name], label, leaf, tensor))
    beside: dict[Any, Any] = unpack(description["beside"]) if "beside" in description else {}
    optimizer.state.clear()
    optimizer.state.update({**fresh, **beside})
    # of ZeRO: more exact than the half-precision weights
    for name, dtype in description.get("masters", {}).items():
        if found[name].dtype == dtype_of(dtype):
            fill(replace(found[name], name=f"{name}/master"))
    set_groups(groups)
    missing = sorted(
        {n for g in description["groups"] for n in g["params"]} - set(description["state"])
    )
    if missing and description["state"]:
        notes = [*notes, f"{len(missing)} parameter(s) had no state when saved"]
    return tuple(notes)


def hooked_optimizer(optimizer: Any) -> tuple[Any, list[Tensor]]:
    """The torch optimizer whose steps alone change the captured tensors, and those they change
    beside its own.
    """
    return optimizer, []


def names_of(optimizer: Any, found: Mapping[str, Source]) -> list[list[str]]:
    """The names of the parameters in each group; of tied names the first."""
    owners = sources_by_parameter(found)
    return [
        [s.name for p in group["params"] for s in owners.get(id(p), [])]
        for group in optimizer.param_groups
    ]


def trained_identities(optimizer: Any, found: Mapping[str, Source]) -> frozenset[int]:
    """The identities of the sources that the optimizer has trained: those whose parameters have
    state.
    """
    owners = sources_by_parameter(found)
    return frozenset(
        source.key for p in _stateful_parameters(optimizer) for source in owners.get(id(p), [])
    )


def sources_by_parameter(found: Mapping[str, Source]) -> dict[int, list[Source]]:
    """The sources in each parameter object, by its id: one, or several for an FSDP1 flat
    parameter.
    """
    owners: dict[int, list[Source]] = {}
    seen: set[int] = set()
    for source in found.values():
        if source.key in seen:
            continue  # a tied name
        seen.add(source.key)
        owners.setdefault(id(parameter_of(source)), []).append(source)
    return owners


def parameter_of(source: Source) -> Any:
    """The parameter object of `source` in an optimizer, or the tensor itself."""
    return optimizer_parameter(source.live)


def _stateful_parameters(optimizer: Any) -> list[Any]:
    """The parameters that have state: in the order of the groups, then those in no group."""
    ordered = {
        id(p): p
        for group in optimizer.param_groups
        for p in group["params"]
        if p in optimizer.state
    }
    ordered.update(
        {
            id(key): key
            for key in optimizer.state
            if isinstance(key, Tensor) and id(key) not in ordered
        }
    )
    return list(ordered.values())


def _other_state(optimizer: Any) -> dict[Any, Any]:
    """State under keys that are not parameters."""
    return {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}


def _state_entry(key: Any, value: Any, parameter: Any, owner: Source) -> tuple[Entry, list[str]]:
    """The entry of a value in the state of `parameter`, and the reasons why it cannot be saved."""
    if type(key) is not str:
        return {}, [f"{key!r}: a key of type {type(key).__name__}, expected str"]
    if isinstance(value, Tensor):
        problem = _tensor_problem(value, owner, parameter)
        return _tensor_entry(value, parameter, owner), [] if problem is None else [
            f"{key}: {problem}"
        ]
    plain = encode_if_plain(value)
    if plain is not None:
        return plain, []
    node, leaves, problems = flatten_container(key, value)
    entries: list[Entry] = []
    for leaf in leaves if not problems else ():
        entries.append(_tensor_entry(leaf.data, parameter, owner))
        problem = _tensor_problem(leaf.data, owner, parameter)
        problems += [] if problem is None else [f"{key}: {problem}"]
    return {"tree": encode_node(node), "leaves": entries}, problems


def _tensor_entry(value: Tensor, parameter: Any, owner: Source) -> Entry:
    """Global shape, dtype, device and, if it is not that of a new tensor, the stride of a
    tensor.
    """
    host = value.device.type == "cpu" and parameter.device.type != "cpu"
    is_run = shows_runs(owner.live) and value.shape == parameter.shape
    shape = list(owner.shape if is_run else value.shape)
    entry = {"shape": shape, "dtype": dtype_name(value.dtype), "host": host}
    if is_run or is_distributed(value) or is_distributed(parameter):
        return entry
    if value.is_contiguous() and parameter.is_contiguous():
        return entry
    like = parameter if value.shape == parameter.shape else torch.empty(value.shape, device="meta")
    if value.stride() != torch.empty_like(like, device="meta").stride() and is_dense(
        shape, value.stride()
    ):
        entry["stride"] = list(value.stride())
    return entry


def _has_shape_of(entry: Any, owner: Source) -> bool:
    """Whether a state tensor has the shape of its parameter, and not one number for all of it."""
    return bool(entry["shape"]) and tuple(entry["shape"]) == owner.shape


def _tensor_problem(value: Tensor, source: Source, parameter: Any) -> str | None:
    if is_distributed(value):
        is_like_parameter = value.numel() == 1 or value.shape == parameter.shape
        return (
            None
            if is_like_parameter
            else f"shape {list(value.shape)}, not that of the sharded parameter"
        )
    if type(value) not in PLAIN or value.layout is not torch.strided or value.is_quantized:
        return (
            f"{type(value).__module__}.{type(value).__qualname__}, an unsupported tensor subclass"
        )
    is_run = shows_runs(source.live)
    cut = is_run or is_distributed(parameter)
    if cut and value.numel() > 1 and not (is_run and value.shape == parameter.shape):
        return f"shape {list(value.shape)} on this rank, not cut like the parameter"
    return None


def _entry_source(owner: Source, key: str, entry: Any, value: Any) -> Source:
    """The source of one state tensor; `value` is this rank's part, or None."""
    name, dtype = f"{owner.name}/{key}", dtype_of(entry["dtype"])
    if is_distributed(value):
        return replace(source_of_tensor(name, owner.raw_name, value), dtype=dtype, trainable=False)
    is_run, shape = shows_runs(owner.live), tuple(entry["shape"])
    sharding: Sharding
    if is_run and _has_shape_of(entry, owner):
        engine, (sharding, local) = owner.engine, state_run(owner.live, value)
    else:  # a rank without a run of the parameter has no state
        engine, sharding = (
            "plain",
            OwnedSharding(shape, entry.get("rank", 0), "rank" not in entry and not is_run),
        )
        local = None if value is None else value.detach()
    return held_source(name, owner.raw_name, shape, engine, sharding, dtype, value).holding(local)


def _empty_state_tensor(entry: Any, parameter: Any, owner: Source) -> Tensor:
    dtype = dtype_of(entry["dtype"])
    device = torch.device("cpu") if entry["host"] else parameter.device
    if "stride" in entry and not is_distributed(parameter) and not shows_runs(owner.live):
        return torch.empty_strided(
            entry["shape"], entry["stride"], dtype=dtype, device=device
        ).zero_()
    if _has_shape_of(entry, owner):
        return torch.zeros_like(
            parameter.detach(), dtype=dtype, device=None if not entry["host"] else device
        )
    return torch.zeros(entry["shape"], dtype=dtype, device=device)
