"""Experts that DeepSpeed's MoE has spread over ranks: "save/2" with groups of two ranks, "take/1" from $LEFT.

$STAGE of ZeRO trains them, in bfloat16 where $STAGE ends in "bf16".
"""

import os
from pathlib import Path
from typing import Any

import harness  # first: it arms the stack dump
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import ft_ckpt
from ft_ckpt import CheckpointSaver
from ft_ckpt.distributed.tensors import ModelTensors
from ft_ckpt.errors import IncompleteError, SelectionError
from ft_ckpt.training import optimizers, zero_optimizer

EXPERTS, WIDTH = 4, 6
STAGE = os.environ.get("STAGE", "0")
IS_HALF = STAGE.endswith("bf16")
LIST = "moe.deepspeed_moe.experts.deepspeed_experts"


class Mixed(nn.Module):
    """A layer of experts between two others; the values of an expert depend on its number alone."""

    def __init__(self, size: int) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        torch.manual_seed(1)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.moe = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), EXPERTS, size, k=1, use_rts=False)
        local = EXPERTS // size
        for place, expert in enumerate(self.moe.deepspeed_moe.experts.deepspeed_experts):
            number = harness.RANK % size * local + place
            for parameter in expert.parameters():
                nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        mixed, loss, _ = self.moe(self.first(rows.to(self.first.weight.dtype)))
        return self.last(mixed).square().mean() + loss


def engine_of(model: nn.Module) -> Any:
    import deepspeed
    from deepspeed.moe.utils import configure_moe_param_groups

    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True}
    config["zero_optimization"] = {"stage": int(STAGE[:1])}
    config["bf16"] = {"enabled": IS_HALF}
    config["data_types"] = {"grad_accum_dtype": "fp32"} if STAGE == "1bf16" else {}  # another optimizer class
    groups = configure_moe_param_groups([*model.parameters()])
    adam = torch.optim.AdamW(groups, lr=0.01)
    return deepspeed.initialize(model=model, optimizer=adam, config=config)[0]


def step(engine: Any) -> None:
    engine.backward(engine(torch.randn(1, 8, WIDTH, generator=torch.Generator().manual_seed(harness.RANK))))
    engine.step()


def saver_of(folder: Path, **registered: Any) -> CheckpointSaver:
    saver = CheckpointSaver(None, folder, enter_timeout_seconds=60, each_rank_writes=os.environ.get("WRITES", "auto"))
    saver.register(**registered)
    return saver


def save(size: int, folder: Path) -> None:
    """All experts under their numbers, as in DeepSpeed's own checkpoint, and their moments; the run goes on exactly."""
    engine = engine_of(Mixed(size))
    step(engine)
    with saver_of(folder / "run", model=engine, optimizer=engine.optimizer) as saver:
        saver.step()
        saver.save_state()
        saver.save(engine, folder / "weights")
    assert STAGE != "0" or names_of_groups(engine) == {name for name, _ in Mixed(1).named_parameters()}
    engine.save_checkpoint(str(folder / "theirs"), tag="now")
    dist.barrier()
    ours = load_file(folder / "weights" / "model.safetensors")
    found = dict(torch.load(folder / "theirs/now/mp_rank_00_model_states.pt", weights_only=False)["module"])
    for number in range(EXPERTS):
        path = folder / f"theirs/now/layer_0_expert_{number}_mp_rank_00_model_states.pt"
        found |= torch.load(path, weights_only=False)
    assert ours.keys() == found.keys(), ours.keys() ^ found.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in found.items())
    assert ft_ckpt.verify(folder / "weights").ok
    again = resumed(size, folder)
    for one in (engine, again):
        step(one)
    after = [dict(one.module.named_parameters()) for one in (engine, again)]
    apart = {name: float((tensor - after[1][name]).detach().abs().max()) for name, tensor in after[0].items()}
    assert not any(apart.values()), apart


def names_of_groups(engine: Any) -> set[str]:
    return {name for names in optimizers.names_of(engine.optimizer, ModelTensors(engine).sources()) for name in names}


def resumed(size: int, folder: Path) -> Any:
    """A new engine, zeroed and then resumed from the checkpoint."""
    engine = engine_of(Mixed(size))
    with torch.no_grad():
        for parameter in engine.parameters():
            parameter.zero_()
    with saver_of(folder / "run", model=engine, optimizer=engine.optimizer) as saver:
        progress = saver.resume("must")
        assert (progress.step, progress.report.problems) == (1, ()), progress
    return engine


def state_of(engine: Any, tensor: torch.Tensor) -> dict[str, Any]:
    """The optimizer's state of a parameter, in the parameter's shape; where ZeRO has it, as DeepSpeed gathers it."""
    if STAGE == "0":
        return dict(engine.optimizer.state[tensor])
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    state = {key: safe_get_full_optimizer_state(tensor, key) for key in ("exp_avg", "exp_avg_sq")}
    return {**state, "master": safe_get_full_fp32_param(tensor)} if IS_HALF else state


def take(size: int, folder: Path) -> None:
    """Each rank reads its own experts, whichever group size they were saved with."""
    left = Path(os.environ["LEFT"])
    engine, local = resumed(size, left), EXPERTS // size
    checkpoint = next((left / "run").glob("checkpoint-*"))
    stored, moments = (
        load_file(left / "weights" / "model.safetensors"),
        load_file(checkpoint / "state/training.safetensors"),
    )
    for name, tensor in engine.module.named_parameters():
        head, _, rest = name.partition(f"{LIST}.")
        place, _, own = rest.partition(".")
        number = harness.RANK % size * local + int(place) if rest else 0
        among_all = f"{head}{LIST}.{number}.{own}" if rest else name
        assert torch.equal(stored[among_all], tensor), name
        for key, value in state_of(engine, tensor).items():
            (kept,) = (one for stored_name, one in moments.items() if stored_name.endswith(f"{among_all}/{key}"))
            assert torch.equal(kept, value), (name, key)


def refuse(size: int, folder: Path) -> None:
    """Experts outside of a list have no numbers, and before the engine there are no groups: both are refused."""
    model = Mixed(size)
    with pytest.raises(IncompleteError, match=rf"{LIST}\.0\.weight.*experts of this rank alone \(ep_size_{size}\)"):
        ModelTensors(model).sources()
    engine = engine_of(model)
    if STAGE != "0":
        engine.optimizer.real_dp_process_group[-1] = dist.group.WORLD
        with pytest.raises(
            SelectionError, match=rf"^{LIST}\.0\.weight: groups of ranks that form no grid, \[0, 1\] and \[0, 1\] here"
        ):
            zero_optimizer.describe(engine.optimizer, ModelTensors(engine).sources())
    model.fused = nn.Parameter(torch.zeros(3))
    model.fused.allreduce, model.fused.group_name = False, f"ep_size_{size}"
    with pytest.raises(IncompleteError, match=r"^fused: experts of this rank alone \(numbers unknown\)"):
        ModelTensors(model).sources()


def case(name: str, folder: Path) -> None:
    action, size = name.split("/")
    {"save": save, "take": take, "refuse": refuse}[action](int(size), folder)


if __name__ == "__main__":
    import deepspeed

    deepspeed.init_distributed("gloo")
    harness.run(case)
