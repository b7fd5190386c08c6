"""One function per wrapper: it takes a bare model and returns the objects of a training script.

`truth` gathers the parameters with torch's or DeepSpeed's own means, never with ft_ckpt.
"""

import re
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

# variables of a launch
ACCELERATE_CPU = {"ACCELERATE_USE_CPU": "true", "ACCELERATE_TORCH_DEVICE": "cpu"}
BLOCKS = (
    "LlamaDecoderLayer",
    "Qwen3DecoderLayer",
    "Olmo2DecoderLayer",
    "MixtralDecoderLayer",
    "GPT2Block",
)
COLUMNWISE = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROWWISE = ("o_proj", "down_proj")
PREFIXES = re.compile(r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


@dataclass
class Live:
    """A wrapped model in training."""

    model: nn.Module
    optimizer: Any
    accelerator: Any = None

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        """Make an optimizer step; return the loss before it."""
        loss = self.model(**batch).loss
        if self.accelerator is None:
            loss.backward()
        else:
            self.accelerator.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


def truth(live: Live) -> dict[str, torch.Tensor]:
    """Gather all parameters and persistent buffers, by the bare model's names, on every rank.

    Collective.
    """
    model = live.model
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # an evaluation leaves the root gathered
    flat = any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
    options = {"writeback": False, "rank0_only": False, "offload_to_cpu": False}
    with FullyShardedDataParallel.summon_full_params(model, **options) if flat else nullcontext():
        return {name: _whole(tensor).detach().clone() for name, tensor in named_tensors(model)}


def named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return this rank's tensors with the bare model's names; a tied one once for each name."""
    inner = getattr(model, "module", None)
    while isinstance(inner, nn.Module):
        model, inner = inner, getattr(inner, "module", None)
    tensors = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    bare = {}
    for name, tensor in tensors:
        if "rotary_emb" not in name and "inv_freq" not in name:
            bare[PREFIXES.sub("", name).removeprefix("module.")] = tensor
    return list(bare.items())


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    if hasattr(tensor, "ds_id"):
        return _gathered(tensor)
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    import deepspeed

    with deepspeed.zero.GatheredParameters([tensor]):
        return tensor.detach().clone()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=0.01, eps=1e-3, foreach=False)


def blocks(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__ in BLOCKS]


def compiled(model: nn.Module) -> nn.Module:
    wrapped: Any = torch.compile(model, backend="eager")
    return wrapped


def compiled_blocks(model: nn.Module) -> nn.Module:
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__ in BLOCKS:
                setattr(module, name, compiled(child))
    return model


def checkpointed(model: nn.Module) -> nn.Module:
    apply_activation_checkpointing(model, check_fn=lambda module: type(module).__name__ in BLOCKS)
    return model


def in_place(model: nn.Module) -> nn.Module:
    nn.Module.compile(model, backend="eager")
    return model


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, find_unused_parameters=True)


def fsdp1(model: nn.Module, **settings: Any) -> nn.Module:
    policy = ModuleWrapPolicy({type(block) for block in blocks(model)})
    settings = {"use_orig_params": True, "device_id": torch.device("cpu"), **settings}
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, **settings)


def flat(model: nn.Module) -> nn.Module:
    return fsdp1(model, use_orig_params=False)


def fsdp1_mixed(model: nn.Module) -> nn.Module:
    return fsdp1(model, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))


def fsdp2(model: nn.Module, mesh: Any = None, **settings: Any) -> nn.Module:
    mesh = mesh if mesh is not None else init_device_mesh("cpu", (dist.get_world_size(),))
    for block in blocks(model):
        fully_shard(block, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


def fsdp2_mixed(model: nn.Module) -> nn.Module:
    return fsdp2(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def tensor_parallel(model: nn.Module, mesh: Any = None) -> nn.Module:
    mesh = mesh if mesh is not None else init_device_mesh("cpu", (dist.get_world_size(),))
    for block in blocks(model):
        plan: dict[str, Any] = {}
        for name, _ in block.named_modules():
            if name.endswith(COLUMNWISE):
                plan[name] = ColwiseParallel()
            if name.endswith(ROWWISE):
                plan[name] = RowwiseParallel()
        parallelize_module(block, mesh, plan)
    return model


def hsdp(model: nn.Module) -> nn.Module:
    return fsdp2(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def fsdp2_tensor_parallel(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    return fsdp2(tensor_parallel(model, mesh["tensor"]), mesh["data"])


def tensor_parallel_replicas(model: nn.Module) -> nn.Module:
    """Replicate groups of two tensor-parallel ranks: a save needs the first group alone."""
    shape = (dist.get_world_size() // 2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    return tensor_parallel(model, mesh["tensor"])


def cut_over_ranks(model: nn.Module, **sizes: int) -> nn.Module:
    """Load the model with transformers over a mesh of those sizes. Collective."""
    from transformers import DistributedConfig

    kind: Any = type(model)
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names)
    if dist.get_rank() == 0:
        kind.save_pretrained(model, names[0])
    dist.barrier()
    return kind.from_pretrained(names[0], distributed_config=DistributedConfig(**sizes)).train()


def distributed(**sizes: int) -> Callable[[nn.Module], Live]:
    """Return a wrapper by `cut_over_ranks`, with the same trained parameters and an optimizer."""

    def wrap(model: nn.Module) -> Live:
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        cut = cut_over_ranks(model, **sizes)
        for name, parameter in cut.named_parameters():
            parameter.requires_grad_(name in trained)
        return Live(cut, adam(cut))

    return wrap


def direct(*wraps: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], Live]:
    """Return a wrapper made of torch's own, without Accelerate."""

    def wrap(model: nn.Module) -> Live:
        for wrap_once in wraps:
            model = wrap_once(model)
        return Live(model, adam(model))

    return wrap


def accelerated(
    make: Callable[[nn.Module], Any], *wraps: Callable[[nn.Module], nn.Module]
) -> Callable[..., Live]:
    """Return a wrapper by the Accelerator that `make(model)` returns, after `wraps`."""

    def wrap(model: nn.Module) -> Live:
        for wrap_once in wraps:
            model = wrap_once(model)
        accelerator = make(model)
        prepared, optimizer = accelerator.prepare(model, adam(model))
        return Live(prepared, optimizer, accelerator)

    return wrap


def cpu_accelerator(model: nn.Module) -> Any:
    from accelerate import Accelerator, DistributedDataParallelKwargs

    options = DistributedDataParallelKwargs(find_unused_parameters=True)
    return Accelerator(cpu=True, kwargs_handlers=[options])


def fsdp_accelerator(version: int) -> Callable[[nn.Module], Any]:
    def make(model: nn.Module) -> Any:
        from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
        from accelerate.state import AcceleratorState
        from accelerate.utils import DistributedType

        AcceleratorState._reset_state()
        PartialState(cpu=True)
        # Accelerate turns FSDP on from MULTI_GPU only; without this the plugin is dropped without a
        # word.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=version,
            cpu_ram_efficient_loading=False,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=[type(blocks(model)[0]).__name__],
            use_orig_params=True if version == 1 else None,
        )
        accelerator = Accelerator(fsdp_plugin=plugin)
        assert accelerator.distributed_type == DistributedType.FSDP, accelerator.distributed_type
        return accelerator

    return make


def deepspeed_accelerator(stage: int) -> Callable[[nn.Module], Any]:
    def make(model: nn.Module) -> Any:
        from accelerate import Accelerator, DeepSpeedPlugin
        from accelerate.state import AcceleratorState
        from accelerate.utils import DistributedType, InitProcessGroupKwargs

        AcceleratorState._reset_state()
        zero: dict[str, Any] = {"stage": stage}
        if stage == 3:
            # Tiny tensors are left whole unless the threshold is zero, and then nothing is tested.
            zero["stage3_gather_16bit_weights_on_model_save"] = True
            zero["stage3_param_persistence_threshold"] = 0
        config = {
            "zero_optimization": zero,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
        }
        plugin = DeepSpeedPlugin(hf_ds_config=config)
        group = InitProcessGroupKwargs(backend="gloo")
        accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[group], cpu=False)
        kind = accelerator.distributed_type
        assert kind == DistributedType.DEEPSPEED, kind
        assert accelerator.num_processes == 2, accelerator.num_processes
        return accelerator

    return make


WRAPPERS: dict[str, Callable[[nn.Module], Live]] = {
    "none": direct(),
    "compiled": direct(compiled),
    "compiled_in_place": direct(in_place),
    "compiled_blocks": direct(compiled_blocks),
    "checkpointed": direct(checkpointed),
    "ddp": accelerated(cpu_accelerator),
    "ddp_compiled": direct(compiled, ddp),
    "compiled_ddp": direct(ddp, compiled),
    "ddp_compiled_blocks": accelerated(cpu_accelerator, compiled_blocks),
    "fsdp1": direct(fsdp1),
    "fsdp1_flat": direct(flat),
    "fsdp1_mixed": direct(fsdp1_mixed),
    "fsdp1_checkpointed": direct(fsdp1, checkpointed),
    "fsdp1_compiled": direct(fsdp1, compiled),
    "fsdp1_accelerate": accelerated(fsdp_accelerator(1)),
    "fsdp2": direct(fsdp2),
    "fsdp2_mixed": direct(fsdp2_mixed),
    "fsdp2_checkpointed": direct(checkpointed, fsdp2),
    "fsdp2_compiled_blocks": direct(compiled_blocks, fsdp2),
    "fsdp2_accelerate": accelerated(fsdp_accelerator(2)),
    "tensor_parallel": direct(tensor_parallel),
    "hsdp": direct(hsdp),
    "tensor_parallel_replicas": direct(tensor_parallel_replicas),
    "fsdp2_tensor_parallel": direct(fsdp2_tensor_parallel),
    "mesh_tensor": distributed(tp_size=2),
    "mesh_experts": distributed(fsdp_size=2, ep_size=2),
    "mesh_tensor_fsdp": distributed(tp_size=2, fsdp_size=2),
    "mesh_hybrid": distributed(fsdp_size=2, dp_replicate_size=2),
    "mesh_experts_fsdp": distributed(fsdp_size=4, ep_size=2),
    "mesh_experts_hybrid": distributed(fsdp_size=2, dp_replicate_size=2, ep_size=2),
    "mesh_experts_tensor": distributed(tp_size=2, fsdp_size=2, ep_size=4),
    "zero1": accelerated(deepspeed_accelerator(1)),
    "zero2": accelerated(deepspeed_accelerator(2)),
    "zero3": accelerated(deepspeed_accelerator(3)),
}
