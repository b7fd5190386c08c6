"""DeepSpeed's ZeRO: parameters that stage 3 partitions, and flat partitions of its optimizers.

Every rank computes the layouts of all ranks from sizes and orders, without communication.
`zero_optimizer` and `engine_numbers` also read DeepSpeed's fields of optimizers.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import Tensor, nn

from ft_ckpt.errors import SelectionError, listing
from ft_ckpt.ranks.sharding import (
    FlatSharding,
    OwnedSharding,
    Sharding,
    Source,
    TensorKind,
    TensorLayout,
    global_rank,
    is_subset_of_ranks,
    layout_like,
    ranks_in_order,
)
from ft_ckpt.ranks.wrappers import Wrapper

_Owners = Mapping[int, Sequence[Source]]  # by the id of this rank's parameter
_SUPPORTED = ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3", "BF16_Optimizer")
_FIELDS = (  # (groups of weights, masters); the first pair that an optimizer has
    ("fp16_groups", "fp32_partitioned_groups_flat"),
    ("bf16_groups", "fp32_groups_flat_partition"),
    ("bit16_groups", "single_partition_of_fp32_groups"),
)


class DeepSpeedWrapper(Wrapper):
    """DeepSpeed's engine around a model."""

    child_key = "module"
    packages = function_packages = ("deepspeed.",)
    attributes = ("_original_parameters", "_external_params", "applied_pre_backward_ref_cnt")
    attribute_prefixes = ("_ds_", "ds_")

    def wraps(self, module: nn.Module) -> bool:
        cls = type(module)  # compared by names, because importing DeepSpeed is slow
        return cls.__name__.endswith("Engine") and "deepspeed" in cls.__module__

    def keeps_weights(self, module: nn.Module) -> bool:
        optimizer = getattr(module, "optimizer", None)
        return self.wraps(module) and hasattr(optimizer, "refresh_fp32_params")

    def hides_tensors(self, module: nn.Module) -> bool:
        return self.wraps(module)  # the optimizers' partitions are in no module


class PartitionedTensors(TensorKind):
    """The parameters that stage 3 partitions."""

    layout_facts = ("ds_shape", "dtype", "requires_grad", "ds_process_group", "ds_tensor.shape")

    def describes(self, tensor: Any) -> bool:
        # under stage 3; stages 1 and 2 leave ordinary parameters
        return hasattr(tensor, "ds_shape")

    def layout_of(self, tensor: Any) -> TensorLayout:
        return layout_like(tensor, tuple(tensor.ds_shape), "zero3", _zero3_sharding(tensor))

    def local_part(self, tensor: Any) -> Tensor | None:
        sharding = _zero3_sharding(tensor)
        if not isinstance(sharding, FlatSharding):
            return None
        span = sharding.range_in_shard(global_rank())  # without the padding
        return None if span is None else tensor.ds_tensor.detach().view(-1)[slice(*span)]

    def has_data(self, tensor: Any) -> bool:
        shard = getattr(tensor, "ds_tensor", None)
        return (shard is not None and shard.device.type != "meta") or super().has_data(tensor)


def _zero3_sharding(parameter: Any) -> Sharding:
    shape = tuple(parameter.ds_shape)
    shard = getattr(parameter, "ds_tensor", None)
    if shard is None or (shard.numel() == 0 and math.prod(shape)):
        return OwnedSharding(shape, None)
    members = ranks_in_order(getattr(parameter, "ds_process_group", None))
    return _flat_sharding(math.prod(shape), 0, shard.numel(), members)


def _flat_sharding(numel: int, first: int, shard: int, members: Sequence[int]) -> FlatSharding:
    return FlatSharding(numel, first, shard, members, is_subset_of_ranks(len(members)))


@dataclass(frozen=True, eq=False)
class Slot:
    """One parameter in a partition, with its position in any buffer that is cut likewise."""

    owner: Source  # of the weight
    sharding: FlatSharding
    start: int  # of this rank's shard in the partition

    def local_run(self, buffer: Tensor) -> Tensor | None:
        """Return this rank's elements in `buffer`, or None."""
        span = self.sharding.range_in_shard(global_rank())
        if span is None:
            return None
        first, stop = span
        return buffer.detach().view(-1)[self.start + first : self.start + stop]


@dataclass(frozen=True, eq=False)
class Partition:
    """A flat run of parameters that this rank updates: one parameter of the inner optimizer."""

    master: Tensor
    group: int
    slots: tuple[Slot, ...]


def zero_partitions(optimizer: Any, owners: _Owners) -> list[Partition]:
    """Return this rank's partitions.

    All ranks have the same number of partitions, with the same parameters. `owners` are the sources
    of the models that the optimizer trains, by the ids of their parameters. Raises SelectionError
    for parameters of unknown models, and for settings under which state cannot be stored by name.
    """
    problems = _refused_settings(optimizer)
    if problems:
        raise SelectionError(
            f"{type(optimizer).__name__}: {listing(problems)}: its state cannot be kept by name; "
            "change these settings, or save without the optimizer's state"
        )
    if hasattr(optimizer, "fp16_groups"):
        return list(_stage_3(optimizer, owners))
    return list(_stages_1_2(optimizer, owners))


def changed_with_steps(optimizer: Any) -> list[Any] | None:
    """Return the masters and their weights, which a step of the inner optimizer changes.

    The step changes the state as well. Returns None if tensors may change outside of steps.
    """
    # momentum changes before the step
    muon = any("use_muon" in group for group in optimizer.optimizer.param_groups)
    if muon or getattr(optimizer, "zenflow", False) or _refused_settings(optimizer):
        return None
    groups, masters = next(fields for fields in _FIELDS if hasattr(optimizer, fields[0]))
    changed = [*getattr(optimizer, masters)]
    for weights in getattr(optimizer, groups):
        changed += weights
    return changed


def _stage_3(optimizer: Any, owners: _Owners) -> Iterator[Partition]:
    """Yield partitions of parameters that are each cut into equal shards.

    A partition is this rank's shards one after the other.
    """
    for number, master in enumerate(optimizer.fp32_partitioned_groups_flat):
        slots = []
        start = 0
        for _, source in _partitioned_sources(owners, optimizer.fp16_groups[number]):
            shard = source.live.ds_tensor.ds_numel
            members = ranks_in_order(source.live.ds_process_group)
            slots.append(Slot(source, _flat_sharding(source.numel, 0, shard, members), start))
            start += shard
        yield Partition(master, optimizer.sub_group_to_group_id[number], tuple(slots))


def _stages_1_2(optimizer: Any, owners: _Owners) -> Iterator[Partition]:
    """Yield partitions of groups whose parameters are concatenated, perhaps aligned.

    A partition is an equal shard of the concatenated group.
    """
    # stage 1 in bfloat16 with float32 gradients has its own class
    if hasattr(optimizer, "bf16_groups"):
        masters = optimizer.fp32_groups_flat_partition
        trained_groups = groups_in_memory = optimizer.bf16_groups
    else:
        masters = optimizer.single_partition_of_fp32_groups
        trained_groups = optimizer.bit16_groups
        groups_in_memory = optimizer.round_robin_bit16_groups
    for number, master in enumerate(masters):
        in_memory = groups_in_memory[number]
        ends = [0, *accumulate(parameter.numel() for parameter in in_memory)]
        starts = getattr(optimizer, "round_robin_bit16_offsets", {number: ends})[number]
        position = {id(parameter): at for at, parameter in enumerate(in_memory)}
        members = ranks_in_order(optimizer.real_dp_process_group[number])
        slots = []
        for parameter, source in _partitioned_sources(owners, trained_groups[number]):
            first = starts[position[id(parameter)]]
            sharding = _flat_sharding(source.numel, first, master.numel(), members)
            slots.append(Slot(source, sharding, 0))
        yield Partition(master, number, tuple(slots))


def _refused_settings(optimizer: Any) -> list[str]:
    """Name the settings under which the state cannot be accessed by parameter name."""
    kind = type(optimizer).__name__
    groups = optimizer.optimizer.param_groups
    facts = {
        f"{kind} is not one of {', '.join(_SUPPORTED)}": kind not in _SUPPORTED,
        "state on NVMe": getattr(optimizer, "swap_optimizer", False),
        "weights on NVMe": getattr(optimizer, "params_in_nvme_and_cpu", False),
        "state offloaded in part (ratio)": getattr(optimizer, "backup_optimizer", None) is not None,
        "states moved away (reload_states() first)": bool(
            getattr(optimizer, "offloaded_states", ())
        ),
        "experts spread over ranks": any(group.get("moe") for group in groups),
        "model parallelism": int(getattr(optimizer, "model_parallel_world_size", 1)) > 1,
    }
    return [fact for fact, is_true in facts.items() if is_true]


def _partitioned_sources(owners: _Owners, parameters: list[Any]) -> list[tuple[Any, Source]]:
    unknown = [at for at, parameter in enumerate(parameters) if id(parameter) not in owners]
    if unknown:
        raise SelectionError(
            f"parameters {unknown} of a group: of no known model; give their model, too"
        )
    pairs = []
    for parameter in parameters:
        pairs += [(parameter, source) for source in owners[id(parameter)]]
    return pairs
