"""Test matrix of workers and tests: the wrappers that share a launch, and the saves under each."""

from dataclasses import dataclass, field
from typing import Any

# save -> the model (a function of models.py) and the arguments of `save`
SAVES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("partly_frozen", {}),
    "converted": ("mixtral", {}),
    "experts": ("experts", {}),
    "hdf5": ("mixtral", {"format": "h5"}),
    "dual": ("partly_frozen", {"format": "dual", "max_shard_size": 30_000}),
    "sharded": ("gpt2", {"max_shard_size": 30_000}),
    "cast": ("olmo2", {"dtype": "bfloat16"}),
    "attribute": ("policy_and_value", {"attribute": "policy"}),
    "attributes": ("policy_and_value", {"attribute": ["policy", "value_head"]}),
    "untouched": ("qwen3", {"chat_template_name": "olmo"}),
    "adapter": ("lora", {"adapter_only": True}),
    "adapter_attribute": ("lora_policy_and_value", {"adapter_only": True, "attribute": "policy"}),
    "merged": ("lora", {"merged": True}),
    "merged_experts": ("lora_experts", {"merged": True}),
    "shared_trunk": ("shared_trunk", {"attribute": ["policy", "value_model"]}),
    "adapter_bytes": ("lora_wide", {"adapter_only": True}),
    "streaming": ("big", {}),
    "after_eval": ("qwen3", {}),
}

FULL = ("full", "converted", "sharded", "cast", "attribute", "attributes", "untouched")
ADAPTER = ("adapter", "adapter_attribute")
TRUNK = ("shared_trunk",)
EVAL = ("after_eval",)
FORMATS = ("hdf5", "dual")
BYTES = ("adapter_bytes",)
MERGED = ("merged", "merged_experts")
MESH = ("full", "experts", "untouched")
EVERYTHING = FULL + ADAPTER + TRUNK


@dataclass(frozen=True)
class Group:
    """Wrappers that share one torchrun launch."""

    ranks: int
    wrappers: dict[str, tuple[str, ...]]  # wrapper -> what is saved under it
    env: dict[str, str] = field(default_factory=dict)

    def cases(self, wrappers: list[str]) -> list[str]:
        return [f"{wrapper}/{what}" for wrapper in wrappers for what in self.wrappers.get(wrapper, ())]


ACCELERATE_CPU = {"ACCELERATE_USE_CPU": "true", "ACCELERATE_TORCH_DEVICE": "cpu"}
WRAPPED = ("full", "adapter", "attribute", "untouched")

GROUPS = {
    "single": Group(
        1,
        {
            "none": EVERYTHING + FORMATS + MERGED,
            "compiled": WRAPPED,
            "compiled_in_place": WRAPPED,
            "compiled_blocks": WRAPPED,
            "checkpointed": WRAPPED,
        },
    ),
    "ddp": Group(
        2,
        {
            "ddp": EVERYTHING + FORMATS + MERGED,
            "ddp_compiled": WRAPPED,
            "compiled_ddp": WRAPPED,
            "ddp_compiled_blocks": WRAPPED,
        },
        ACCELERATE_CPU,
    ),
    "fsdp1": Group(
        2,
        {
            "fsdp1": (
                *FULL,
                *ADAPTER,
                *BYTES,
                *EVAL,
                *FORMATS,
                "merged",
            ),  # PEFT's target_parameters do not train under it
            "fsdp1_mixed": ("full", "adapter", *EVAL),
            "fsdp1_flat": FULL,
            "fsdp1_checkpointed": (*WRAPPED, "merged"),
            "fsdp1_compiled": WRAPPED,
            "fsdp1_accelerate": ("full", "adapter", "attribute"),
        },
        ACCELERATE_CPU,
    ),
    "fsdp2": Group(
        2,
        {
            "fsdp2": (*EVERYTHING, *MERGED, *BYTES, *EVAL, *FORMATS, "streaming"),
            "fsdp2_mixed": ("full", "adapter", *EVAL),
            "fsdp2_checkpointed": WRAPPED,
            "fsdp2_compiled_blocks": WRAPPED,
            "fsdp2_accelerate": ("full", "adapter", "attribute"),
            "tensor_parallel": ("full", "attribute", "untouched"),
        },
        ACCELERATE_CPU,
    ),
    "four": Group(
        4,
        {
            "hsdp": ("full", "converted", "adapter", "attributes", "merged"),
            "fsdp2_tensor_parallel": ("full", "attribute", "untouched"),
        },
    ),
    "mesh": Group(2, {"mesh_tensor": MESH, "mesh_experts": ("experts",)}),
    "mesh_four": Group(
        4,
        {
            "mesh_tensor_fsdp": MESH,
            "mesh_hybrid": MESH,
            **dict.fromkeys(("mesh_experts_fsdp", "mesh_experts_hybrid", "mesh_experts_tensor"), ("experts",)),
        },
    ),
    "zero12": Group(2, {"zero1": WRAPPED, "zero2": EVERYTHING}, {"DS_ACCELERATOR": "cpu"}),
    "zero3": Group(2, {"zero3": (*EVERYTHING, *MERGED, *BYTES, *EVAL, *FORMATS)}, {"DS_ACCELERATOR": "cpu"}),
}


def wrappers_that_save(what: str) -> list[str]:
    """Every wrapper under which `what` is saved, in launch order."""
    return [wrapper for group in GROUPS.values() for wrapper, saves in group.wrappers.items() if what in saves]


def group_of(wrapper: str) -> str:
    return next(name for name, group in GROUPS.items() if wrapper in group.wrappers)
