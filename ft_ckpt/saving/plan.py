"""What is saved and how it is laid out: a plan without tensors and modules, made from names, shapes and settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from torch import Tensor, nn

from ft_ckpt.config import SaverConfig
from ft_ckpt.distributed.live_sources import engine_names, from_state_dict
from ft_ckpt.distributed.ranks import Ranks
from ft_ckpt.distributed.samples import picked_indices
from ft_ckpt.distributed.tensor_info import TensorInfo, Tensors
from ft_ckpt.formats.registry import format_named
from ft_ckpt.model.merge_choice import MergeChoice
from ft_ckpt.model.parts import Attribute, parts_of
from ft_ckpt.model.selection import without_own_layouts
from ft_ckpt.saving import replicas, reuse_frozen
from ft_ckpt.saving.check_logits import LogitsCheck
from ft_ckpt.saving.files import PartPlan, plan_part
from ft_ckpt.storage.place import Place
from ft_ckpt.training.capture import Captured
from ft_ckpt.training.items import model_sources
from ft_ckpt.training.state import state_part
from ft_ckpt.training.tensor_keys import HeldTensors, KeyedFacts, with_tensor


@dataclass(frozen=True, eq=False)
class SaveRequest:
    """One call of `save`, its defaults filled in."""

    model: nn.Module
    target: Place
    dtype: str
    chat_template_name: str | None
    format: str
    max_shard_bytes: int
    tokenizer: Any
    adapter_only: bool
    step: int | None
    metrics: Mapping[str, float]
    base_id: str | None = None
    attribute: Attribute = None
    state_dict: Mapping[str, Tensor] | None = None
    state_dict_given: bool = False
    captured: Captured | None = None  # the tensors by key, and of a run its state; None: not looked at yet
    run_id: str | None = None
    protect: tuple[Place, ...] = ()  # checkpoints not to be deleted for want of room
    extra_files: Mapping[str, str | bytes] = field(default_factory=dict)  # the caller's own, by path in the checkpoint
    apart: replicas.Differences | None = None  # what ranks have come apart in; None: not looked at yet
    made_from: tuple[str, ...] = ()  # names of what the weights were computed from
    merged: MergeChoice | None = None  # the adapters that are merged into the base
    check: LogitsCheck | None = None  # what the folder must compute before it is committed


def request_of(config: SaverConfig, model: nn.Module, target: Place, **given: Any) -> SaveRequest:
    """The request for `model`, with what `config` says where the call did not."""
    own: dict[str, Any] = {"dtype": config.dtype, "format": config.format, "base_id": config.base_id}
    own |= {"chat_template_name": config.chat_template_name, "max_shard_bytes": config.max_shard_bytes}
    return SaveRequest(model, target, **own, **given)


@dataclass(frozen=True, eq=False)
class SavePlan:
    """What goes where, without a tensor or a module: they are found by key and place in the inventory of a moment."""

    plans: tuple[PartPlan, ...]
    engine: str
    ties_to_check: tuple[tuple[TensorInfo, TensorInfo], ...]
    weights: Any  # what the document of the state says of them
    sampled: Mapping[str, Mapping[str, list[int]]]  # flat indices of elements of an adapter's base, by part and name


def make_plan(request: SaveRequest, captured: Captured, ranks: Ranks, config: SaverConfig) -> tuple[SavePlan, Tensors]:
    """The plan for the live model as it is now, and those who have its tensors; nothing is made yet.

    Raises SelectionError and its kin when the model does not have what was asked for, IncompleteError for what the
    files would lack.
    """
    inventory, state = captured.inventory, captured.state
    own, tensors = model_sources(captured.found) or inventory.infos(), cast("Tensors", inventory)
    links = format_named(request.format).is_plain and request.merged is None  # what is exported is a folder by itself
    mode = config.reuse_frozen if links else "off"
    still = reuse_frozen.frozen_identities(own)  # before others take their place, so that all ranks plan the same files
    if request.state_dict_given:
        given = from_state_dict(request.state_dict, {n: with_tensor(one, inventory) for n, one in own.items()}, ranks)
        facts, tensors = KeyedFacts(inventory, is_given=True), HeldTensors({s.key: s.local for s in given.values()})
        own = {name: facts.without_tensor(source) for name, source in given.items()}
    asked: dict[str, Any] = {"adapter_only": request.adapter_only, "attribute": request.attribute}
    asked["merged"] = request.merged
    parts = parts_of(request.model, own, **asked, dtype=request.dtype, extra=_non_tensor_state(request, captured))
    parts = without_own_layouts(parts, state is not None)
    if state is not None:
        parts.append(state_part(state, parts, own))
    if request.apart:
        parts = replicas.store_differences(parts, request.apart)
    frozen = [reuse_frozen.frozen_names(part, still, mode) for part in parts]
    ties = tuple(pair for part in parts for pair in part.doubtful)
    engine = engine_names([*own.values(), *captured.found.values()])
    saved = {id(part.module) for part in parts}
    modules = {id(module): place for place, module in enumerate(inventory.modules) if id(module) in saved}
    bare = [replace(p, module=modules.get(id(p.module), p.module), doubtful=(), passed=()) for p in parts]
    plans = tuple(
        plan_part(part, request.max_shard_bytes, request.format, names)
        for part, names in zip(bare, frozen, strict=True)
    )
    sampled = {part.name: picked_indices(part.base) for part in parts if part.base}
    return SavePlan(plans, engine, ties, captured.document.get("weights"), sampled), tensors


def _non_tensor_state(request: SaveRequest, captured: Captured) -> dict[str, Any]:
    """What the model's state dict lists that is no tensor. An adapter's run has it with its state."""
    if request.adapter_only and captured.state is not None:
        return {}
    found = captured.inventory.added()
    return {name: one.value for name, one in found.items() if not isinstance(one.value, Tensor)}
