"""Finds out which elements of parameters each rank of DeepSpeed's ZeRO has.

Stage 3 partitions the parameters of the model: each rank has an equal shard of each parameter. In
all stages, the optimizer has flat float32 buffers on each rank, the masters. A partition is such a
buffer with the parameters whose elements are in it. Stage 3 concatenates the rank's shards:

    rank 0:  [ shard 0 of a | shard 0 of b | shard 0 of c ]
    rank 1:  [ shard 1 of a | shard 1 of b | shard 1 of c ]

Stages 1 and 2 concatenate the parameters, and cut the result into equal shards:

    [ a a a a | b b b b b b | c c ]  ->  rank 0: [ a a a a b b ]   rank 1: [ b b b b c c ]

Every rank computes the layouts of all ranks from the sizes and the order of the parameters, without
communication. `zero_optimizer` and `engine_numbers` also read fields of DeepSpeed's optimizers.
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

# The sources of each parameter, by the id of the parameter on this rank.
_Owners = Mapping[int, Sequence[Source]]
_SUPPORTED = ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3", "BF16_Optimizer")
# (field with the groups of weights, field with the masters). The first pair counts that an
# optimizer has.
_FIELDS = (
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
        cls = type(module)  # its name is compared, because importing DeepSpeed is slow
        return cls.__name__.endswith("Engine") and "deepspeed" in cls.__module__

    def keeps_weights(self, module: nn.Module) -> bool:
        optimizer = getattr(module, "optimizer", None)
        return self.wraps(module) and hasattr(optimizer, "refresh_fp32_params")

    def hides_tensors(self, module: nn.Module) -> bool:
        return self.wraps(module)  # the partitions of its optimizers are in no module


class PartitionedTensors(TensorKind):
    """The parameters that stage 3 partitions."""

    layout_facts = ("ds_shape", "dtype", "requires_grad", "ds_process_group", "ds_tensor.shape")

    def describes(self, tensor: Any) -> bool:
        # Stage 3 partitions parameters. Stages 1 and 2 leave them as they are.
        return hasattr(tensor, "ds_shape")

    def layout_of(self, tensor: Any) -> TensorLayout:
        return layout_like(tensor, tuple(tensor.ds_shape), "zero3", _zero3_sharding(tensor))

    def local_part(self, tensor: Any) -> Tensor | None:
        sharding = _zero3_sharding(tensor)
        if not isinstance(sharding, FlatSharding):
            return None
        span = sharding.range_in_shard(global_rank())  # leaves the padding out
        if span is None:
            return None
        shard: Tensor = tensor.ds_tensor.detach().view(-1)
        return shard[slice(*span)]

    def has_data(self, tensor: Any) -> bool:
        shard = getattr(tensor, "ds_tensor", None)
        if shard is not None and shard.device.type != "meta":
            return True
        return super().has_data(tensor)


def _zero3_sharding(parameter: Any) -> Sharding:
    shape = tuple(parameter.ds_shape)
    shard = getattr(parameter, "ds_tensor", None)
    if shard is None or (shard.numel() == 0 and math.prod(shape)):
        return OwnedSharding(shape, None)
    members = ranks_in_order(getattr(parameter, "ds_process_group", None))
    return _flat_sharding(math.prod(shape), 0, shard.numel(), members)


def _flat_sharding(
    numel: int, first: int, shard_numel: int, members: Sequence[int]
) -> FlatSharding:
    """Return the sharding of a parameter that begins at `first` in a concatenated buffer.

    The buffer is cut into shards of `shard_numel` elements, one for each rank in `members`.
    """
    return FlatSharding(numel, first, shard_numel, members, is_subset_of_ranks(len(members)))


@dataclass(frozen=True, eq=False)
class Slot:
    """One parameter in a partition, and its position in the buffers of the partition.

    Attributes:
        owner: The source of the parameter.
        sharding: Which elements of the parameter each rank has.
        start: Where this rank's shard begins in its buffer, in elements.
    """

    owner: Source
    sharding: FlatSharding
    start: int

    def local_run(self, buffer: Tensor) -> Tensor | None:
        """Return the parameter's elements in this rank's `buffer`, or None if it has none."""
        span = self.sharding.range_in_shard(global_rank())
        if span is None:
            return None
        first, stop = span
        return buffer.detach().view(-1)[self.start + first : self.start + stop]


@dataclass(frozen=True, eq=False)
class Partition:
    """A flat buffer of weights that this rank updates.

    Attributes:
        master: The buffer, which is one parameter of the inner optimizer.
        group: The number of its parameter group.
        slots: The parameters in it.
    """

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
    """Return the tensors that a step of the inner optimizer changes: the masters and the weights.

    The step changes the optimizer's state as well. Returns None if tensors may change outside of
    steps.
    """
    # Muon changes the momentum before the step.
    muon = any("use_muon" in group for group in optimizer.optimizer.param_groups)
    if muon or getattr(optimizer, "zenflow", False) or _refused_settings(optimizer):
        return None
    groups_field, masters_field = next(
        fields for fields in _FIELDS if hasattr(optimizer, fields[0])
    )
    changed_tensors = [*getattr(optimizer, masters_field)]
    for weights in getattr(optimizer, groups_field):
        changed_tensors += weights
    return changed_tensors


def _stage_3(optimizer: Any, owners: _Owners) -> Iterator[Partition]:
    """Yield the partitions of stage 3: this rank's shards, one after the other."""
    for number, master in enumerate(optimizer.fp32_partitioned_groups_flat):
        slots = []
        start = 0
        for _, source in _partitioned_sources(owners, optimizer.fp16_groups[number]):
            shard_numel = source.live.ds_tensor.ds_numel
            members = ranks_in_order(source.live.ds_process_group)
            sharding = _flat_sharding(source.numel, 0, shard_numel, members)
            slots.append(Slot(source, sharding, start))
            start += shard_numel
        yield Partition(master, optimizer.sub_group_to_group_id[number], tuple(slots))


def _stages_1_2(optimizer: Any, owners: _Owners) -> Iterator[Partition]:
    """Yield the partitions of stages 1 and 2: this rank's shard of each concatenated group.

    The parameters of a group may be in another order in memory, and may be aligned.
    """
    # Stage 1 in bfloat16 with float32 gradients has a class of its own.
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
        # Without alignment, a parameter starts where the one before it ends.
        starts = getattr(optimizer, "round_robin_bit16_offsets", {number: ends})[number]
        position = {id(parameter): index for index, parameter in enumerate(in_memory)}
        members = ranks_in_order(optimizer.real_dp_process_group[number])
        slots = []
        for parameter, source in _partitioned_sources(owners, trained_groups[number]):
            first = starts[position[id(parameter)]]
            sharding = _flat_sharding(source.numel, first, master.numel(), members)
            slots.append(Slot(source, sharding, 0))
        yield Partition(master, number, tuple(slots))


def _refused_settings(optimizer: Any) -> list[str]:
    """Return the settings under which the state cannot be accessed by parameter name."""
    kind = type(optimizer).__name__
    groups = optimizer.optimizer.param_groups
    is_refused = {
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
    return [setting for setting, refused in is_refused.items() if refused]


def _partitioned_sources(owners: _Owners, parameters: list[Any]) -> list[tuple[Any, Source]]:
    """Return each parameter with each of its sources.

    Raises SelectionError for parameters of unknown models.
    """
    unknown = [index for index, parameter in enumerate(parameters) if id(parameter) not in owners]
    if unknown:
        raise SelectionError(
            f"parameters {unknown} of a group: of no known model; give their model, too"
        )
    pairs = []
    for parameter in parameters:
        pairs += [(parameter, source) for source in owners[id(parameter)]]
    return pairs
