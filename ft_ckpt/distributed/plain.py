"""Tensors that every rank has whole: no wrapper, DDP, torch.compile, activation checkpointing."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ft_ckpt.distributed.sharding import ReplicatedSharding
from ft_ckpt.distributed.wrapper_protocol import TensorLayout, Wrapper


class PlainTensors(Wrapper):
    """Ordinary tensors; on ordinary modules, which Accelerate may have put hooks on."""

    layout_facts = ("shape", "dtype", "requires_grad")
    attributes = ("forward",)
    attribute_prefixes = ("_hf_hook", "_old_forward")

    def describes(self, tensor: Any) -> bool:
        """Any tensor that no engine has laid out."""
        return True

    def layout_of(self, tensor: Any) -> TensorLayout:
        """The whole tensor on every rank."""
        shape, is_parameter = tuple(tensor.shape), isinstance(tensor, nn.Parameter)
        sharding = ReplicatedSharding(shape)
        return TensorLayout(shape, tensor.dtype, bool(tensor.requires_grad), is_parameter, "plain", sharding)

    def local_part(self, tensor: Any) -> Tensor | None:
        """The tensor itself."""
        return tensor.detach()  # type: ignore[no-any-return]  # a Tensor


class DataParallelWrapper(Wrapper):
    """DistributedDataParallel and DataParallel: the model as it is, under "module"."""

    child_key = "module"
    attribute_prefixes = ("_ddp_",)

    def wraps(self, module: nn.Module) -> bool:
        """Whether it is one of torch's two."""
        return isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel)

    def broadcast_buffers(self, module: nn.Module) -> Iterable[Tensor]:
        """Those of DDP, unless it was told not to."""
        if isinstance(module, nn.parallel.DistributedDataParallel) and module.will_sync_module_buffers():  # type: ignore[no-untyped-call]
            yield from module.modules_buffers


class CompiledWrapper(Wrapper):
    """What torch.compile() returns; `module.compile()` wraps nothing."""

    child_key = "_orig_mod"
    attributes = ("_is_torch_compile", "_compile_kwargs")  # the second is of Lightning, where that was imported

    def wraps(self, module: nn.Module) -> bool:
        """Whether it is torch's OptimizedModule."""
        return isinstance(module, torch._dynamo.OptimizedModule)


class CheckpointedActivations(Wrapper):
    """Activation checkpointing by a wrapper around each layer."""

    child_key = "_checkpoint_wrapped_module"

    def wraps(self, module: nn.Module) -> bool:
        """Whether it is torch's ActivationWrapper."""
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper

        return isinstance(module, ActivationWrapper)
