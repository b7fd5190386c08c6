"""ZeRO's optimizer state by name: captured, compared with DeepSpeed's own view, put into fresh
engines, trained on.

A case is the name of an engine, see tests/helpers/zero_engines.py.
"""

import importlib.util
import json
import os
import random
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from on_ranks import RANK, call_on_ranks, on_ranks
from tuning import buckets_of
from wrappers import deepspeed_accelerator
from zero_engines import adam, build, engine

from ft_ckpt import CheckpointSaver
from ft_ckpt.errors import CorruptError, LoadError, NotACheckpointError, RankError, SelectionError
from ft_ckpt.extensions.deepspeed.engine_numbers import EngineCounters
from ft_ckpt.extensions.deepspeed.zero_optimizer import ZeroOptimizers
from ft_ckpt.integrations.open_instruct_state import (
    ClientState,
    load_checkpoint_state,
    save_checkpoint_state,
)
from ft_ckpt.ranks import current_ranks
from ft_ckpt.ranks.moving import gather_tensors
from ft_ckpt.ranks.sharding import box_memories
from ft_ckpt.ranks.wrappers import ModelTensors
from ft_ckpt.runs.optimizers import TorchOptimizers, unwrap_optimizer

ZERO, TORCH = ZeroOptimizers(), TorchOptimizers()
DEEPSPEED = {"DS_ACCELERATOR": "cpu"}
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs the deepspeed extra"
)


WHOLE = [
    *("zero1", "zero2", "zero1_bf16", "zero2_bf16", "zero1_bf16_gradients32", "zero2_offload"),
    *("zero1_aligned", "zero2_bf16_robin", "zero2_bf16_robin_aligned"),
    *("zero3", "zero3_bf16", "zero3_bf16_offload", "zero3_bf16_subgroups_persistent"),
]


def under_zero(test):
    """Run a test on two ranks in which DeepSpeed is there."""
    return needs_deepspeed(on_ranks(2, env=DEEPSPEED, timeout=280)(test))


class Counted(torch.optim.Optimizer):
    """Momentum with a step count that is a plain number, as DeepSpeed's own Adam for the host has
    it.
    """

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("step", 0)
                state.setdefault("momentum", torch.zeros_like(parameter)).mul_(0.9).add_(
                    parameter.grad
                )
                state["step"] += 1
                parameter.sub_(state["momentum"], alpha=group["lr"] / state["step"])


def batch(step, alike):
    return torch.randint(
        13, (2, 6), generator=torch.Generator().manual_seed(100 * step + (0 if alike else RANK))
    )


def train(live, steps, alike=False):
    """The losses; with `alike` every rank has the same batch, so that any number of ranks takes the
    same steps.
    """
    losses = []
    for step in steps:
        loss = live(batch(step, alike))
        live.backward(loss)
        live.step()
        losses.append(float(loss.detach()))
    return losses


def capture(live):
    """The content of a checkpoint, on every rank: the description, and all tensors in full, weights
    included.
    """
    found = ModelTensors(live).sources()
    described = ZERO.describe(unwrap_optimizer(live.optimizer), found)
    described = json.loads(json.dumps(described))
    described["counters"] = EngineCounters(live).state_dict()
    captured = ZERO.state_tensors(unwrap_optimizer(live.optimizer), described, found)
    with buckets_of(256):
        full = gather_tensors([*found.values(), *captured.values()], current_ranks())
    shared = [full]
    dist.broadcast_object_list(shared)
    assert current_ranks().agree("descriptions", {"described": described}, same=("described",))
    return described, shared[0]


class Filler:
    """Stands for a file: copies this rank's block of a full tensor, and refuses another shape or
    dtype.
    """

    def __init__(self, full):
        self.full = full

    def __call__(self, source):
        full, local = self.full[source.name], source.local
        assert (tuple(full.shape), full.dtype) == (source.shape, source.dtype), source.name
        for box, memory in box_memories(source.sharding.local_boxes(RANK), local):
            assert memory.shape == box.sizes
            memory.copy_(cut(full.reshape(source.sharding.view), box))


def cut(full, box):
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        full = full.narrow(dim, offset, size)
    return full


def restore(live, described, full):
    fill = Filler(full)
    found = ModelTensors(live).sources()
    with torch.no_grad():
        for source in found.values():
            fill(source)
    notes = ZERO.restore(unwrap_optimizer(live.optimizer), described, found, fill)
    ZERO.after_restore(unwrap_optimizer(live.optimizer))
    if "counters" in described:
        EngineCounters(live).load_state_dict(described["counters"])
    return notes


def same(one, other):
    assert set(one) == set(other), set(one) ^ set(other)
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different, different


def as_deepspeed_sees_it(live, full):
    """DeepSpeed's own gathering of every trained parameter's master and moments, against ours."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if hasattr(live.optimizer, "_hp_optimizer_states_linked"):
        # It links the state after the first group's first step, when the other groups have none
        # yet.
        live.optimizer._hp_optimizer_states_linked = False
        live.optimizer._lazy_init_hp_params_optimizer_state()
    checked = 0
    for name, source in ModelTensors(live).sources().items():
        if not source.trainable or name == "head.weight":
            continue
        master = full.get(f"{name}/master", full[name])
        assert torch.equal(safe_get_full_fp32_param(source.live), master), name
        for key in ("exp_avg", "exp_avg_sq"):
            state = safe_get_full_optimizer_state(source.live, key)
            assert state.abs().sum() > 0, f"{name}: nothing to compare"
            assert torch.equal(state, full[f"{name}/{key}"]), f"{name}/{key}"
        checked += 1
    assert checked == 6
    assert not any(name.startswith(("inner.2", "head.weight/")) and "/" in name for name in full)


@pytest.mark.sample("zero1_aligned", "zero2_bf16_robin_aligned", "zero3_bf16")
@pytest.mark.parametrize("case", WHOLE)
@under_zero
def test_a_fresh_engine_goes_on_to_the_bit(case):
    """Capture, compare, and continue in a fresh engine as the first one does, to the bit."""
    live = engine(case)
    before = capture(live)
    assert before[0]["state"] == {}
    first_losses = train(live, range(2))
    described, full = capture(live)
    for name, dtype in described["masters"].items():
        assert torch.equal(full[f"{name}/master"].to(full[name].dtype), full[name]), (name, dtype)
    if "robin" not in case:  # DeepSpeed's view assumes the layout without it
        as_deepspeed_sees_it(live, full)
    assert bool(described["masters"]) == (full["scale"].dtype != torch.float32)
    losses = train(live, range(2, 4))
    after = capture(live)

    again = engine(case, lr=0.5)
    assert restore(again, described, full) == ()
    restored = capture(again)
    assert restored[0] == described
    assert all(
        p.numel() == p.ds_numel for p in again.parameters() if getattr(p, "ds_persist", False)
    )
    same(restored[1], full)
    assert train(again, range(2, 4)) == losses
    assert capture(again)[0] == after[0]
    same(capture(again)[1], after[1])

    # Resumed again, into an engine that has trained since.
    assert restore(again, described, full) == ()
    assert train(again, range(2, 4)) == losses
    same(capture(again)[1], after[1])

    # Taken back before the first step: it forgets what came after.
    assert restore(live, *before) == ()
    assert train(live, range(2)) == first_losses


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize("case", ["zero1", "zero2_bf16", "zero3_bf16"])
def test_a_fresh_engine_on_one_rank(case):
    call_on_ranks(1, test_a_fresh_engine_goes_on_to_the_bit, case, env=DEEPSPEED, timeout=280)


def leave(folder, case):
    """Save the state with the same batch on every rank, and the losses and the state of two more
    steps.
    """
    live = engine(case)
    train(live, range(2), alike=True)
    before = capture(live)
    losses = train(live, range(2, 4), alike=True)
    after = capture(live)[1]
    if RANK == 0:
        torch.save({"before": before, "losses": losses, "after": after}, folder / "left.pt")
    dist.barrier()


def arrive(folder, before, after):
    """Go on from what another number of ranks, perhaps in another stage, left: the same state,
    losses and weights.
    """
    left = torch.load(folder / "left.pt")
    live = engine(after, lr=0.5)
    assert restore(live, *left["before"]) == ()
    described, full = capture(live)
    assert described == left["before"][0]
    same(full, left["before"][1])
    # stage 3 has another way to add a linear layer's bias
    if (before[:5] == "zero3") == (after[:5] == "zero3"):
        assert train(live, range(2, 4), alike=True) == left["losses"]
        same(capture(live)[1], left["after"])


FROM_TWO = [
    ("zero1", "zero2"),
    ("zero2_bf16", "zero2_bf16"),
    ("zero2_bf16_robin", "zero2_bf16_robin"),
    ("zero1_bf16_gradients32", "zero1_bf16_gradients32"),
    ("zero2_bf16", "zero3_bf16"),
    ("zero3", "zero3"),
    ("zero3_bf16_subgroups_persistent", "zero3_bf16"),
]
FROM_ONE = [
    ("zero1", "zero1"),
    ("zero2_bf16", "zero2_bf16_robin"),
    ("zero2_bf16", "zero1_bf16_gradients32"),
    ("zero3_bf16", "zero2_bf16"),
    ("zero3_bf16", "zero3_bf16_subgroups_persistent"),
    ("zero1", "zero3"),
]
MOVED = [(before, 2, after, 1) for before, after in FROM_TWO] + [
    (before, 1, after, 2) for before, after in FROM_ONE
]


@needs_deepspeed
@pytest.mark.sample("zero3-2-zero3-1", "zero1-1-zero3-2")
@pytest.mark.parametrize(("before", "ranks", "after", "more"), MOVED)
def test_on_another_number_of_ranks(tmp_path, before, ranks, after, more):
    """After an engine of stage 3, those of the other stages add a bias in another way: they have a
    launch of their own.

    Stage 3 shares the launch of the other tests.
    """
    call_on_ranks(
        ranks, leave, tmp_path, before, launch=launch_of(before), env=DEEPSPEED, timeout=280
    )
    call_on_ranks(
        more, arrive, tmp_path, before, after, launch=launch_of(after), env=DEEPSPEED, timeout=280
    )


def launch_of(case):
    return "" if case.startswith("zero3") else case[:5]


def plain(model, optimizer, steps):
    losses = []
    for step in steps:
        loss = model(batch(step, alike=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def plain_capture(model, optimizer):
    found = ModelTensors(model).sources()
    described = TORCH.describe(optimizer, found)
    every = [*found.values(), *TORCH.state_tensors(optimizer, described, found).values()]
    return described, {source.name: source.live.detach().clone() for source in every}


@pytest.mark.slow
@pytest.mark.parametrize("case", ["zero2", "zero2_bf16", "zero3", "zero3_bf16"])
@under_zero
def test_from_a_plain_optimizer(case):
    """Torch's AdamW goes on in ZeRO; half-precision weights get masters that are equal to them."""
    # first: with stage 3, DeepSpeed adds the bias of all linear layers in another way
    live = engine(case, lr=0.5)
    model = build()
    optimizer = adam(model)
    plain(model, optimizer, range(2))
    described, full = plain_capture(model, optimizer)
    losses = plain(model, optimizer, range(2, 4))
    after = plain_capture(model, optimizer)[1]
    weights = {
        name: ModelTensors(live).sources()[name].dtype for name in ModelTensors(live).sources()
    }
    full = {name: tensor.to(weights.get(name, tensor.dtype)) for name, tensor in full.items()}
    assert restore(live, described, full) == ()
    got, state = capture(live)
    same({name: state[name] for name in full}, full)
    assert got["state"] == described["state"]
    assert [group["values"] for group in got["groups"]] == [
        group["values"] for group in described["groups"]
    ]
    for name in got["masters"]:
        assert torch.equal(state[f"{name}/master"], full[name].float())
    if not got["masters"]:
        assert train(live, range(2, 4), alike=True) == losses
        same(capture(live)[1], after)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["zero1", "zero3"])
@under_zero
def test_to_a_plain_optimizer(case):
    """ZeRO goes on in torch's AdamW."""
    live = engine(case)
    train(live, range(2), alike=True)
    described, full = capture(live)
    losses = train(live, range(2, 4), alike=True)
    after = capture(live)[1]
    model = build()
    optimizer = adam(model, lr=0.5, frozen=False)
    found, fill = ModelTensors(model).sources(), Filler(full)
    with torch.no_grad():
        for source in found.values():
            fill(source)
    TORCH.restore(optimizer, described, found, fill)
    got, state = plain_capture(model, optimizer)
    assert (got["groups"], got["state"]) == (described["groups"], described["state"])
    same(state, full)
    assert plain(model, optimizer, range(2, 4)) == losses
    same(plain_capture(model, optimizer)[1], after)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["zero2", "zero3"])
@under_zero
def test_from_half_precision_to_float32(case):
    """Half precision goes on in float32: the weights are what the masters were, not what was left
    of them.
    """
    live = engine(f"{case}_bf16")
    train(live, range(2))
    described, full = capture(live)
    again = engine(case)
    halves = {
        name: tensor.float() if name in ModelTensors(live).sources() else tensor
        for name, tensor in full.items()
    }
    assert restore(again, described, halves) == ()
    state = capture(again)[1]
    assert len(described["masters"]) == 6
    for name in described["masters"]:
        assert torch.equal(state[name], full[f"{name}/master"])
        assert torch.equal(state[f"{name}/exp_avg"], full[f"{name}/exp_avg"])


@pytest.mark.slow
@pytest.mark.parametrize("case", ["zero2", "zero3"])
@under_zero
def test_incomplete_state(case):
    """A parameter without state, and one with another step count than the others."""
    live = engine(case)
    train(live, range(2))
    described, full = capture(live)
    stateless = {
        **described,
        "state": {k: v for k, v in described["state"].items() if k != "inner.0.weight"},
    }
    assert restore(live, stateless, full) == ("1 parameter(s) had no state when saved",)
    state = capture(live)[1]
    assert not state["inner.0.weight/exp_avg"].any()
    same(
        state,
        {**full, **{k: v for k, v in state.items() if k.startswith("inner.0.weight/exp_avg")}},
    )

    with pytest.raises(LoadError, match=r"step is 2.0 for embed.weight and 7.0 for inner.4.weight"):
        restore(live, described, {**full, "inner.4.weight/step": torch.tensor(7.0)})
    more = {"max_exp_avg_sq": described["state"]["scale"]["exp_avg"]}
    more = {name: {**entries, **more} for name, entries in described["state"].items()}
    with pytest.raises(
        LoadError,
        match=r"embed.weight: exp_avg, exp_avg_sq, max_exp_avg_sq, step in the checkpoint",
    ):
        restore(live, {**described, "state": more}, full)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["zero2", "zero2_bf16", "zero3", "zero3_bf16"])
@under_zero
def test_other_parameters_are_refused_by_name(case):
    """The weights, which were restored before, stay as they were saved."""
    live = engine(case)
    train(live, range(2))
    described, full = capture(live)
    again = engine(case)
    groups = [
        {**described["groups"][0], "params": ["embed.weight", "other"]},
        described["groups"][1],
    ]
    with pytest.raises(LoadError, match="other: in the checkpoint's optimizer, not trained here"):
        restore(again, {**described, "groups": groups}, full)
    ZERO.after_restore(unwrap_optimizer(again.optimizer))
    state = capture(again)[1]
    names = ModelTensors(live).sources()
    same({name: state[name] for name in names}, {name: full[name] for name in names})


@pytest.mark.slow
@pytest.mark.parametrize("case", ["zero2", "zero3"])
@under_zero
def test_a_count_that_is_a_plain_number(case):
    """A count that is a plain number stays one, also when it comes from a tensor."""
    live = engine(case, optimizer=Counted)
    train(live, range(2))
    described, full = capture(live)
    assert described["state"]["scale"]["step"] == {"value": 2}
    losses = train(live, range(2, 4))
    as_tensor = {"shape": [], "dtype": "float32", "host": False}
    tensors = {n: {**entries, "step": as_tensor} for n, entries in described["state"].items()}
    steps = {f"{name}/step": torch.tensor(2.0) for name in tensors}
    for state, more in ((described["state"], {}), (tensors, steps)):
        again = engine(case, lr=0.5, optimizer=Counted)
        restore(again, {**described, "state": state}, {**full, **more})
        assert capture(again)[0] == described
        assert train(again, range(2, 4)) == losses


@pytest.mark.slow
@pytest.mark.parametrize("case", ["zero2", "zero3"])
@under_zero
def test_what_is_refused(case):
    live = engine(case)
    found = ModelTensors(live).sources()
    with pytest.raises(SelectionError, match="of no known model"):
        ZERO.describe(unwrap_optimizer(live.optimizer), {"scale": found["scale"]})
    train(live, range(1))
    partition = next(iter(live.optimizer.optimizer.state))
    live.optimizer.optimizer.state[partition]["absmax"] = torch.ones(2)
    with pytest.raises(
        SelectionError, match=r"embed.weight: absmax: shape \[2\], not cut like the parameters"
    ):
        ZERO.describe(unwrap_optimizer(live.optimizer), found)
    live.optimizer.model_parallel_world_size = 2
    with pytest.raises(SelectionError, match="model parallelism"):
        ZERO.describe(unwrap_optimizer(live.optimizer), found)
    live.optimizer.model_parallel_world_size = 1
    live.optimizer.optimizer.param_groups[0]["moe"] = True
    with pytest.raises(SelectionError, match="experts spread over ranks"):
        ZERO.describe(unwrap_optimizer(live.optimizer), found)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["zero2_bf16", "zero3_bf16"])
@under_zero
def test_loss_scaler_of_float16(case):
    """The dynamic loss scaler of float16 training, which this machine may not have: put in by
    hand.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    lives = []
    for cuts in (3, 0):
        live = engine(case)
        live.optimizer.loss_scaler = DynamicLossScaler(64.0, 2, 1.0, 2, False)
        for number in range(2 * cuts):
            live.optimizer.loss_scaler.update_scale(number < cuts)
        lives.append(live)
    described, full = capture(lives[0])
    assert described["scaler"] == {
        "cur_scale": 32.0,
        "cur_iter": 6,
        "last_overflow_iter": 2,
        "cur_hysteresis": 2,
    }
    restore(lives[1], described, full)
    assert vars(lives[1].optimizer.loss_scaler) == vars(lives[0].optimizer.loss_scaler)
    restore(engine(case), described, full)  # has none


@pytest.mark.sample("zero2")
@pytest.mark.parametrize("case", ["zero1", "zero2", "zero1_bf16_gradients32", "zero3"])
@under_zero
def test_gradients_of_half_a_step_are_seen(case):
    """Between two micro-batches of a step there are gradients that are not captured."""
    live = engine(case, accumulation=2)
    seen = []
    for _ in range(2):
        seen.append(ZERO.is_accumulating(unwrap_optimizer(live.optimizer)))
        for step in range(2):
            live.backward(live(batch(step, alike=False)))
            seen.append(ZERO.is_accumulating(unwrap_optimizer(live.optimizer)))
            live.step()
            seen.append(ZERO.is_accumulating(unwrap_optimizer(live.optimizer)))
    assert seen == [False, True, True, True, False] * 2, seen


@pytest.mark.slow
@pytest.mark.parametrize("case", ["zero2", "zero3"])
@under_zero
def test_within_accelerate(case):
    """Inside Accelerate's wrappers."""
    model = build()
    prepared, optimizer = deepspeed_accelerator(int(case[-1]))(model).prepare(model, adam(model))
    assert ZERO.recognizes(unwrap_optimizer(optimizer))
    assert unwrap_optimizer(optimizer) is prepared.optimizer
    train(prepared, range(2))
    as_deepspeed_sees_it(prepared, capture(prepared)[1])


class MakesFolder:
    """Its pickle creates a folder when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


CLIENT = {
    "training_step": 2,
    "episode": 64,
    "num_total_tokens": 4711,
    "dataloader_state": {"training_step": 2, "current_epoch": 0},
    "data_prep_actor_state": {
        "training_step": 3,
        "last_consumed_step": 2,
        "iter_dataloader_state": {"epoch": 1, "batches_processed": 3, "excluded_indices": [5, 8]},
    },
}


def scheduled(case, lr=0.02):
    live = engine(case, lr)
    live.lr_scheduler = torch.optim.lr_scheduler.LinearLR(live.optimizer.optimizer, 1.0, 0.1, 10)
    return live


def train_on_noise(live, steps, shared):
    """The losses of batches from the global random numbers; `shared`, those of rank 0."""
    losses = []
    for _ in range(steps):
        tokens = (torch.randint(13, (2, 6)) + random.randrange(13) + np.random.randint(13)) % 13
        if shared:
            dist.broadcast(tokens, 0)
        loss = live(tokens)
        live.backward(loss)
        live.step()
        losses.append(float(loss.detach()))
    return losses


def seed(number):
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def save_as_open_instruct(live, folder, client):
    """As `save_checkpoint_state` of grpo_fast.py does it."""
    states = {
        "torch_cpu_rng_state": torch.get_rng_state(),
        "numpy_rng_state": np.random.get_state(),
        "python_rng_state": random.getstate(),
    }
    live.save_checkpoint(str(folder), client_state={**client, "rng_states": states, "rank": RANK})


@pytest.mark.slow
@pytest.mark.parametrize("case", ["zero2_bf16", "zero3_bf16"])
@under_zero
def test_from_and_to_folders_of_open_instruct(tmp_path, case):
    """From the folder of open-instruct's trainer through a checkpoint of ours to such a folder, to
    the bit.
    """
    shared = "zero3" not in case
    live = scheduled(case)
    seed(RANK)
    train_on_noise(live, 2, shared)
    save_as_open_instruct(live, tmp_path / "theirs", CLIENT)
    losses = train_on_noise(live, 2, shared)
    after = capture(live)

    live, client = scheduled(case, lr=0.5), ClientState()
    seed(99)
    report = load_checkpoint_state(live, tmp_path / "theirs", client)
    lost = (
        "rng: absent: on rank 1: the folder has RNG states of rank 0 only; this rank keeps its own"
    )
    assert report.problems == ((lost,) if shared else ()), report.problems
    assert client == CLIENT
    assert {item.name for item in report.items} == {
        "weights",
        "optimizer",
        "scheduler",
        "rng",
        *CLIENT,
    }
    with CheckpointSaver(directory=tmp_path / "ours") as saver:
        saver.register(
            model=live, optimizer=live.optimizer, scheduler=live.lr_scheduler, client=client
        )
        saver.step(step=client["training_step"])
        saver.save_state()
    assert train_on_noise(live, 2, shared) == losses
    again = capture(live)
    again[0]["counters"]["micro_steps"] += 2  # DeepSpeed counts these from 0
    assert again[0] == after[0]
    same(again[1], after[1])

    live, client = scheduled(case, lr=0.5), ClientState()
    with CheckpointSaver(directory=tmp_path / "ours") as saver:
        saver.register(
            model=live, optimizer=live.optimizer, scheduler=live.lr_scheduler, client=client
        )
        assert saver.resume().step == 2
    assert (client, live.global_steps) == (CLIENT, 2)
    save_checkpoint_state(live, tmp_path / "again", client)
    assert (tmp_path / "again/latest").read_text() == "global_step2"

    live = scheduled(case, lr=0.5)
    # as open-instruct does, with all of its pickles
    states = live.load_checkpoint(str(tmp_path / "again"))[1]
    assert {name: states[name] for name in CLIENT} == CLIENT
    torch.set_rng_state(states["rng_states"]["torch_cpu_rng_state"])
    np.random.set_state(states["rng_states"]["numpy_rng_state"])
    random.setstate(states["rng_states"]["python_rng_state"])
    assert train_on_noise(live, 2, shared) == losses
    same(capture(live)[1], after[1])


@pytest.mark.slow
@pytest.mark.parametrize("case", ["zero2_bf16", "zero3_bf16"])
@under_zero
def test_folders_of_open_instruct_that_change_nothing(tmp_path, case):
    """A tmp_path that would run code, is damaged, or is of another run changes nothing."""
    live = scheduled(case)
    train(live, range(1))
    here = scheduled(case)
    untouched = capture(here)[1]

    def refuse(name, error, match):
        client = ClientState(training_step=0)
        with pytest.raises((error, RankError), match=match):
            load_checkpoint_state(here, tmp_path / name, client)
        assert client == {"training_step": 0}
        same(capture(here)[1], untouched)

    save_as_open_instruct(
        live, tmp_path / "hostile", {**CLIENT, "extra": MakesFolder(tmp_path / "ran")}
    )
    refuse("hostile", LoadError, "refers to posix.mkdir")
    assert not (tmp_path / "ran").exists()
    save_as_open_instruct(live, tmp_path / "other", {"episode": 3})
    refuse("other", LoadError, "training_step: False in the folder, True here")
    save_as_open_instruct(live, tmp_path / "damaged", CLIENT)
    dist.barrier()
    if RANK == 0:
        path = next((tmp_path / "damaged").glob("global_step1/*rank_1_*optim_states.pt"))
        with zipfile.ZipFile(path) as archive:
            largest = max(
                archive.infolist(),
                key=lambda record: ("/data/" in record.filename, record.file_size),
            )
            at = path.read_bytes().index(archive.read(largest)) + 5
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)
        (tmp_path / "empty").mkdir()
    dist.barrier()
    refuse("damaged", CorruptError, "optim_states.pt")
    refuse("empty", NotACheckpointError, "no .*_model_states.pt in it")
    live.lr_scheduler = None
    save_as_open_instruct(live, tmp_path / "unscheduled", CLIENT)
    refuse("unscheduled", LoadError, "scheduler: False in the folder, True here")


def test_the_engine_counts_on():
    def engine(accumulation, **counts):
        return SimpleNamespace(gradient_accumulation_steps=lambda: accumulation, **counts)

    live = engine(4, global_steps=5, global_samples=80, micro_steps=22, skipped_steps=1)
    counters = EngineCounters(live).state_dict()
    assert counters["micro_steps"] == 22
    for accumulation, micro_steps in ((4, 22), (2, 12), (8, 42)):
        again = engine(accumulation)
        EngineCounters(again).load_state_dict(counters)
        assert (again.global_steps, again.global_samples, again.skipped_steps) == (5, 80, 1)
        assert again.micro_steps == micro_steps


def test_an_optimizer_of_another_kind_is_told_apart():
    assert not ZERO.recognizes(torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))]))
