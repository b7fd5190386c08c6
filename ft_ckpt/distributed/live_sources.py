"""Descriptions of tensors together with the tensors, while a run is described or restored; never in a plan."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from ft_ckpt.distributed import added_state as beside
from ft_ckpt.distributed import wrappers
from ft_ckpt.distributed.added_state import AddedValue
from ft_ckpt.distributed.inventory import inventory_of
from ft_ckpt.distributed.ranks import Ranks
from ft_ckpt.distributed.sharding import OwnedSharding
from ft_ckpt.distributed.tensor_info import Source, TensorInfo
from ft_ckpt.errors import IncompleteError, listing


def sources(model: nn.Module, allow_meta: bool = False) -> dict[str, Source]:
    """What `Inventory.infos` says of `model`, each with its tensor. Raises what that raises."""
    inventory = inventory_of(model)
    infos = inventory.infos("", allow_meta)
    return {name: _source_with_tensor(info, inventory.live(info.key)) for name, info in infos.items()}


def source_of_tensor(name: str, raw: str, tensor: Any) -> Source:
    """The source of a parameter, a buffer or what stands for one, under whatever engine holds it."""
    shape, dtype, trainable, is_parameter, engine, sharding = wrappers.layout_of(tensor)
    info = TensorInfo(id(tensor), name, raw, shape, dtype, trainable, is_parameter, engine, sharding)
    return _source_with_tensor(info, tensor)


def added_state_of(model: nn.Module, found: Mapping[str, Source] | None = None) -> dict[str, AddedValue]:
    """What the modules of `model` list beside parameters and persistent buffers, tensors or not, by canonical name.

    `found` are its sources, if they are known.
    """
    found = sources(model, allow_meta=True) if found is None else found
    return beside.added_state(wrappers.unwrap(model), _live_tensors(found))


def restore_added_state(model: nn.Module, values: Mapping[str, Any]) -> None:
    """Give back what `added_state_of` listed when it was saved. Raises LoadError naming what was not taken back."""
    inventory = inventory_of(model)
    infos = inventory.infos(allow_meta=True)
    live = {name: inventory.live(info.key) for name, info in infos.items() if not info.is_added}
    beside.load_added_state(wrappers.unwrap(model), live, values)


def from_state_dict(
    state_dict: Mapping[str, Tensor] | None, live: Mapping[str, Source], ranks: Ranks
) -> dict[str, Source]:
    """Sources that take their data from a state dict the caller gathered, checked against the `live` model.

    Only rank 0's dict is read. Raises IncompleteError naming every entry that is missing, unexpected, or of another
    shape or dtype.
    """
    if not ranks.leads:
        return {n: replace(one, sharding=OwnedSharding(one.shape, 0), local=None) for n, one in live.items()}
    tied: dict[int, list[str]] = {}
    for name, source in live.items():
        tied.setdefault(source.key, []).append(name)
    given = {name: tensor for name, tensor in (state_dict or {}).items() if isinstance(tensor, Tensor)}
    problems = [f"{name}: not in the model" for name in given if name not in live]
    result: dict[str, Source] = {}
    for name, source in live.items():
        tensor = next((given[alias] for alias in [name, *tied[source.key]] if alias in given), None)
        if tensor is None:
            problems.append(f"{name}: missing")
        elif tuple(tensor.shape) != source.shape:
            problems.append(f"{name}: shape {tuple(tensor.shape)}, the model has {source.shape}")
        elif tensor.dtype != source.dtype:
            problems.append(f"{name}: {tensor.dtype}, the model has {source.dtype} (dtype= casts while saving)")
        else:
            made = source_of_tensor(name, source.raw_name, tensor.detach())
            result[name] = replace(made, trainable=source.trainable, key=source.key)
    if problems:
        raise IncompleteError(
            f"{listing(problems)}: the state dict differs from the live model in {len(problems)} place(s); gather it "
            "with accelerator.get_state_dict under the unwrapped model's names, or leave state_dict= out"
        )
    return result


def engine_names(found: Iterable[TensorInfo]) -> str:
    """Which engines hold the tensors, for the manifest: "plain", or e.g. "fsdp2"."""
    return "+".join(sorted({info.engine for info in found} - {"plain"})) or "plain"


def _source_with_tensor(info: TensorInfo, live: Any) -> Source:
    facts = info.shape, info.dtype, info.trainable, info.is_parameter, info.engine, info.sharding, info.is_added
    local, full = wrappers.local_part(live), partial(wrappers.full_tensor, live)
    return Source(id(live), info.name, info.raw_name, *facts, live, local, full)


def _live_tensors(found: Mapping[str, Source]) -> dict[str, Any]:
    """The parameters and buffers among `found`."""
    return {name: source.live for name, source in found.items() if not source.is_added}
