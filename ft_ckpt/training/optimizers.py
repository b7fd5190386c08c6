"""The state of torch optimizers by parameter name, and its restoration.

`describe` describes this rank's state, and `state.merge_descriptions` merges the descriptions of all ranks;
`state_tensors` gives the tensors as sources, sharded like their parameters; `restore` creates the state again, for any
order of parameters, number of ranks or wrapper at the save. `zero_optimizer` has the same functions for DeepSpeed's
optimizers; `items` chooses between the two. No tensor moves between ranks here.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, ValuesView
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ft_ckpt.distributed.sharding import OwnedSharding, Sharding
from ft_ckpt.distributed.source import Source, held_source
from ft_ckpt.distributed.tensor_parallel import stands_for_another
from ft_ckpt.distributed.tensors import source_of_tensor
from ft_ckpt.distributed.wrappers import is_distributed, optimizer_parameter, shows_runs, state_run
from ft_ckpt.errors import LoadError, SelectionError, listing
from ft_ckpt.formats import pytree, safetensors
from ft_ckpt.formats.dtypes import dtype_name, dtype_of
from ft_ckpt.formats.pytree import PLAIN, decode_value, encode_value, flatten

Description = dict[str, Any]  # {"class": str, "groups": [{"params": [names], ...}], "state": {name: {key: entry}}}

_EXPERTS = ("moe", "name")  # settings by which DeepSpeed finds the ranks of an expert group in this run
GroupValues = tuple[dict[str, Any], Mapping[str, Any]]  # a live group, and the values described for it


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group without its parameters: {"value": JSON} by key, None for values that cannot be saved."""
    return {key: _encode_hyperparameter(value) for key, value in group.items() if key != "params"}


def match_groups(
    groups: Sequence[dict[str, Any]],
    live: Sequence[Collection[str]],
    description: Mapping[str, Any],
    found: Mapping[str, Source],
) -> tuple[list[GroupValues], list[str]]:
    """Match live groups with described ones. Returns each group with its described values, and notes.

    `live` has the parameter names of each group. Groups are compared by position and by all names in them. ZeRO drops
    frozen parameters: those without state may be on one side only while they are frozen. Raises LoadError for any
    other difference.
    """
    first: dict[int, str] = {}
    canonical = {name: first.setdefault(source.key, name) for name, source in found.items()}
    stored = [{canonical.get(name, name) for name in group["params"]} for group in description["groups"]]
    with_state = {canonical.get(name, name) for name in description["state"]}
    live_names, stored_names = {name for names in live for name in names}, {name for names in stored for name in names}
    problems = _group_differences(live_names, stored_names, with_state, found)
    ours, theirs = [live_names & stored_names & set(names) for names in live], [names & live_names for names in stored]
    places = {frozenset(names): place for place, names in enumerate(theirs) if names}
    pairs: list[GroupValues] = []
    notes: list[str] = []
    for number, (group, names) in enumerate(zip(groups, ours, strict=True)):
        place = number if ours == theirs else places.get(frozenset(names))
        if place is not None:
            pairs.append((group, description["groups"][place]["values"]))
        elif not names:
            notes.append(f"parameter group {number} shares no parameter with the checkpoint: its settings stay")
        elif not problems:
            problems.append(
                f"parameter group {number}: its {len(names)} parameters are not one group in the checkpoint"
            )
    if problems:
        raise LoadError(f"{listing(problems)}; resume with the model and parameter groups of the saved run")
    return pairs, notes


def check_settings(groups: Iterable[GroupValues]) -> None:
    """Raise LoadError for described values whose type differs from the live group's."""
    problems = [
        f"{key}: {value!r:.60} in the checkpoint, {group[key]!r:.60} here"
        for group, values in groups
        for key, stored in values.items()
        if key in group and not _can_replace(key, value := decode_value(stored["value"]), group[key])
    ]
    if problems:
        raise LoadError(f"{listing(problems)}; resume with the optimizer of the saved run")


def _can_replace(key: str, value: Any, live: Any) -> bool:
    """Whether a stored setting may replace a live one: both of one type, or one None, except for "lr"."""
    if value is None or live is None:
        return value is live or key != "lr"
    if isinstance(live, tuple):
        same = isinstance(value, (tuple, list)) and len(value) == len(live)
        return same and all(_can_replace(key, *pair) for pair in zip(value, live, strict=True))
    return _kind_of_setting(value) == _kind_of_setting(live)


def _kind_of_setting(value: Any) -> str:
    if isinstance(value, bool):
        return "bool"
    return "number" if isinstance(value, (int, float, Tensor)) else type(value).__name__


def set_groups(groups: Iterable[GroupValues]) -> None:
    """Set the described values of each group, except those that identify the ranks of its experts."""
    for group, values in groups:
        kept = _EXPERTS if group.get("moe") else ()
        for key, value in values.items():
            if key not in kept:
                _set_hyperparameter(group, key, value)


def _group_differences(
    live: set[str], stored: set[str], with_state: set[str], found: Mapping[str, Source]
) -> list[str]:
    """The parameters that only one side trains."""
    only_here = [name for name in live - stored if found[name].trainable or name in with_state]
    lost = [name for name in (stored | with_state) - live if name not in found]
    only_there = [name for name in stored - live if name in found and (found[name].trainable or name in with_state)]
    return [
        *(f"{name}: trained here, not in the checkpoint's optimizer" for name in sorted(only_here)),
        *(f"{name}: in the checkpoint's optimizer, not trained here" for name in sorted([*lost, *only_there])),
    ]


def _encode_hyperparameter(value: Any) -> Any:
    """{"tensor": dtype, "value": number} or {"value": JSON of a simple value}; None for other values."""
    if isinstance(value, Tensor) and type(value) in PLAIN and value.numel() == 1:
        return {"tensor": dtype_name(value.dtype), "value": encode_value(value.item())}
    return encode_if_plain(value)


def encode_if_plain(value: Any) -> dict[str, Any] | None:
    """{"value": JSON} of a simple value; None for other values."""
    try:
        return {"value": encode_value(value)}
    except SelectionError:
        return None


def _set_hyperparameter(group: dict[str, Any], key: str, stored: dict[str, Any]) -> None:
    value = decode_value(stored["value"])
    if "tensor" not in stored:
        group[key] = value
    elif isinstance(group.get(key), Tensor):
        group[key].fill_(value)  # in place: captured CUDA graphs refer to it
    else:
        group[key] = torch.tensor(value, dtype=dtype_of(stored["tensor"]), device="cpu")


_MOST_BESIDE_BYTES = 1 << 20


def unwrap_optimizer(optimizer: Any) -> Any:
    """The optimizer inside Accelerate's wrapper, if there is one."""
    while type(optimizer).__module__.startswith("accelerate.") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def describe(optimizer: Any, found: Mapping[str, Source]) -> Description:
    """This rank's part of the optimizer's state as JSON: plain values, and shape and dtype of tensors.

    `found` are the sources of the models it trains; their `requires_grad` does not matter. Raises SelectionError naming
    what cannot be saved: tensor subclasses, Python objects, parameters of unknown models, further entries of its state
    dict.
    """
    owners, problems = sources_by_parameter(found), unsaveable_state(optimizer)
    groups: list[Description] = []
    for number, group in enumerate(optimizer.param_groups):
        names = [[source.name for source in owners.get(id(p), [])] for p in group["params"]]
        problems += [f"parameter {i} of group {number}: of no known model" for i, n in enumerate(names) if not n]
        values = settings_of(group)
        problems += [
            f"group {number}: {key} is a {type(group[key]).__name__}" for key, v in values.items() if v is None
        ]
        groups.append({"params": list(chain(*names)), "values": values})
    state: Description = {}
    for parameter in _stateful_parameters(optimizer):
        if id(parameter) not in owners:
            problems.append(f"state of a tensor of shape {list(parameter.shape)}: of no known model")
        here = [source for source in owners.get(id(parameter), []) if not stands_for_another(source.live)]
        for key, value in optimizer.state[parameter].items():
            for source in here:
                entry = _state_entry(value, parameter, source)
                problem = _state_problem(value, source, parameter) if entry is not None else type(value).__name__
                problems += [f"{source.name}: {key}: {problem}"] if problem else []
                state.setdefault(source.name, {})[key] = entry
    if problems:
        raise SelectionError(
            f"{type(optimizer).__name__}: {listing(problems)}: cannot be saved, so a run could not be resumed exactly; "
            "use an optimizer whose state is tensors and numbers, or save without its state"
        )
    described = {"class": type(optimizer).__name__, "groups": groups, "state": state}
    return described | ({"beside": _describe_other_state(beside)} if (beside := _other_state(optimizer)) else {})


def unsaveable_state(optimizer: Any) -> list[str]:
    """The reasons why the optimizer's state can never be saved; known before its first step."""
    problems = []
    if isinstance(optimizer, torch.optim.LBFGS):
        problems.append("its state belongs to all parameters together")
    problems += [
        f"its {name!r} is an optimizer with state of its own; register that one in its place, or give both one `state`"
        for name in _inner_optimizers(optimizer)
    ]
    if not problems and type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
        further = [key for key in optimizer.state_dict() if key not in ("state", "param_groups")]
        problems += [f"its state dict has {key!r} too" for key in further]
    try:
        _describe_other_state(_other_state(optimizer))
    except SelectionError as error:
        problems.append(str(error))
    return problems


def _inner_optimizers(optimizer: Any) -> list[str]:
    """The attributes that are or contain other optimizers with separate state."""
    own = {name: value for name, value in vars(optimizer).items() if name not in ("state", "param_groups")}
    held = {name: value.values() if isinstance(value, Mapping) else value for name, value in own.items()}
    held = {name: value if isinstance(value, (list, tuple, ValuesView)) else [value] for name, value in held.items()}
    return [
        name
        for name, values in held.items()
        if any(isinstance(one, torch.optim.Optimizer) and one.state is not optimizer.state for one in values)
    ]


def state_tensors(optimizer: Any, description: Description, found: Mapping[str, Source]) -> dict[str, Source]:
    """The tensors of the described state as sources, by "parameter/key"; the same names on every rank.

    Raises SelectionError naming state that this rank lacks for its parts of parameters, and other ranks have.
    """
    sources, missing = {}, []
    for name, entries in description["state"].items():
        owner = found[name]
        state = optimizer.state.get(parameter_of(owner), {})
        for key, entry in entries.items():
            if "dtype" not in entry:
                continue
            is_cut = _has_shape_of(entry, owner) and (shows_runs(owner.live) or is_distributed(owner.live))
            if key not in state and is_cut and owner.local is not None and owner.local.numel() > 0:
                missing.append(f"{name}: {key}")
            sources[f"{name}/{key}"] = _entry_source(owner, key, entry, state.get(key))
    refuse_missing_state(optimizer, missing)
    return sources


def refuse_missing_state(optimizer: Any, missing: list[str]) -> None:
    """Raise SelectionError naming the state that this rank lacks, if any."""
    if missing:
        raise SelectionError(
            f"{type(optimizer).__name__}: {listing(missing)}: other ranks have this state for their parts of the "
            "parameters, this rank has not, so a part would be lost; step on all ranks, or save without the "
            "optimizer's state"
        )


def check(optimizer: Any, description: Description, found: Mapping[str, Source]) -> None:
    """Raise LoadError if parameters, groups or settings differ from the description. Changes nothing."""
    check_settings(match_groups(optimizer.param_groups, names_of(optimizer, found), description, found)[0])


def restore(
    optimizer: Any,
    description: Description,
    found: Mapping[str, Source],
    fill: Callable[[Source], Any],
    later: Callable[[Source], Any] | None = None,
) -> tuple[str, ...]:
    """Set the described state; `fill` reads this rank's elements of a source. Returns notes.

    `later`, if given, collects sources to be filled together after the return; here all of them can wait.

    State is matched by name, groups by the names in them; state that is not described is dropped, so that nothing of
    later steps is left. Raises LoadError for parameters or groups on one side only.
    """
    fill = later or fill
    groups, notes = match_groups(optimizer.param_groups, names_of(optimizer, found), description, found)
    fresh: dict[Any, dict[str, Any]] = {}
    for name, entries in description["state"].items():
        if stands_for_another(found[name].live):
            continue
        parameter = parameter_of(found[name])
        state = fresh.setdefault(parameter, {})
        for key, entry in entries.items():
            if "dtype" not in entry:
                state[key] = decode_value(entry["value"])
                continue
            if key not in state:
                state[key] = _empty_state_tensor(entry, parameter, found[name])
            fill(_entry_source(found[name], key, entry, state[key]))
    beside: dict[Any, Any] = {}
    if "beside" in description:
        beside, device = pytree.load_object(description["beside"]["text"]), description["beside"]["device"]
        beside = tree_map_only(Tensor, lambda tensor: tensor.to(device), beside)
    optimizer.state.clear()
    optimizer.state.update({**fresh, **beside})
    for name, dtype in description.get("masters", {}).items():  # of ZeRO: more exact than the half-precision weights
        if found[name].dtype == dtype_of(dtype):
            fill(replace(found[name], name=f"{name}/master"))
    set_groups(groups)
    missing = sorted({n for g in description["groups"] for n in g["params"]} - set(description["state"]))
    if missing and description["state"]:
        notes = [*notes, f"{len(missing)} parameter(s) had no state when saved"]
    return tuple(notes)


def hooked_optimizer(optimizer: Any) -> tuple[Any, list[Tensor]]:
    """The torch optimizer whose steps alone change the captured tensors, and those they change beside its own."""
    return optimizer, []


def names_of(optimizer: Any, found: Mapping[str, Source]) -> list[list[str]]:
    """The names of the parameters in each group; of tied names the first."""
    owners = sources_by_parameter(found)
    return [[s.name for p in group["params"] for s in owners.get(id(p), [])] for group in optimizer.param_groups]


def trained_identities(optimizer: Any, found: Mapping[str, Source]) -> frozenset[int]:
    """The identities of the sources that the optimizer has trained: those whose parameters have state."""
    owners = sources_by_parameter(found)
    return frozenset(source.key for p in _stateful_parameters(optimizer) for source in owners.get(id(p), []))


def sources_by_parameter(found: Mapping[str, Source]) -> dict[int, list[Source]]:
    """The sources in each parameter object, by its id: one, or several for an FSDP1 flat parameter.

    An expert's parameter also has the sources of the experts that other ranks hold in its place.
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
    ordered = {id(p): p for group in optimizer.param_groups for p in group["params"] if p in optimizer.state}
    ordered.update({id(key): key for key in optimizer.state if isinstance(key, Tensor) and id(key) not in ordered})
    return list(ordered.values())


def _other_state(optimizer: Any) -> dict[Any, Any]:
    """State under keys that are not parameters."""
    return {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}


def _describe_other_state(state: dict[Any, Any]) -> Description:
    leaves = flatten(state, safetensors.NAMES, "state", PLAIN)[1]
    tensors = [leaf.data for leaf in leaves if not leaf.is_array]
    size, devices = sum(leaf.data.nbytes for leaf in leaves), sorted({tensor.device.type for tensor in tensors})
    if size > _MOST_BESIDE_BYTES or len(devices) > 1:
        raise SelectionError(
            f"{size:,} bytes of tensors on {' and '.join(devices)} under keys that are not parameters, expected "
            f"{_MOST_BESIDE_BYTES:,} at most, on one kind of device"
        )
    return {"text": pytree.dump_object(state, "state"), "device": devices[0] if devices else "cpu"}


def _state_entry(value: Any, parameter: Any, owner: Source) -> Any:
    """Global shape, dtype and device of a tensor, or {"value": plain value}; None for anything else."""
    if isinstance(value, Tensor):
        host = value.device.type == "cpu" and parameter.device.type != "cpu"
        cut = shows_runs(owner.live) and value.dim() > 0
        shape = list(owner.shape if cut else value.shape)
        return {"shape": shape, "dtype": dtype_name(value.dtype), "host": host}
    return encode_if_plain(value)


def _has_shape_of(entry: Any, owner: Source) -> bool:
    """Whether a state tensor has the shape of its parameter, and not one number for all of it."""
    return bool(entry["shape"]) and tuple(entry["shape"]) == owner.shape


def _state_problem(value: Any, source: Source, parameter: Any) -> str | None:
    if not isinstance(value, Tensor) or is_distributed(value):
        return None
    if type(value) not in PLAIN or value.layout is not torch.strided or value.is_quantized:
        return f"{type(value).__module__}.{type(value).__qualname__}, an unsupported tensor subclass"
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
    value = None if stands_for_another(owner.live) else value
    sharding: Sharding
    if is_run and _has_shape_of(entry, owner):
        engine, (sharding, local) = owner.engine, state_run(owner.live, value)
    else:  # a rank without a run of the parameter has no state
        engine, sharding = "plain", OwnedSharding(shape, entry.get("rank", 0), "rank" not in entry and not is_run)
        local = None if value is None else value.detach()
    return held_source(name, owner.raw_name, shape, engine, sharding, dtype, value).holding(local)


def _empty_state_tensor(entry: Any, parameter: Any, owner: Source) -> Tensor:
    dtype = dtype_of(entry["dtype"])
    device = torch.device("cpu") if entry["host"] else parameter.device
    if _has_shape_of(entry, owner):
        return torch.zeros_like(parameter.detach(), dtype=dtype, device=None if not entry["host"] else device)
    return torch.zeros(entry["shape"], dtype=dtype, device=device)
