"""Replicas that differ between ranks: under DDP, FSDP2, in the foreground and in the background."""

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import harness  # first: it arms the stack dump
import models
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from wrappers import WRAPPERS, Live, adam, truth

from ft_ckpt import CheckpointSaver, latest, verify
from ft_ckpt.errors import IncompleteError, RanksDisagreeError

SHORT = {"enter_timeout_seconds": 30, "each_rank_writes": "on", "on_difference": "ignore"}


def saver_of(live: Live, folder: Path, **settings: Any) -> CheckpointSaver:
    saver = CheckpointSaver(live.accelerator, folder, **{**SHORT, **settings})
    saver.register(model=live.model, optimizer=live.optimizer)
    return saver


class Counting(nn.Module):
    """A layer with statistics of what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(rows)))


def steps(live: Live, first: int, count: int) -> list[float]:
    losses = []
    for step in range(first, first + count):
        rows = torch.randn(4, 3, generator=torch.Generator().manual_seed(97 * step + harness.RANK))
        loss = live.model(rows).square().mean()
        loss.backward()
        live.optimizer.step()
        live.optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def counting(wrap: Any) -> Live:
    torch.manual_seed(0)
    model = wrap(Counting())
    return Live(model, adam(model))


def local_model() -> Live:
    """As LocalSGD leaves it between two averages: without communication of the ranks."""
    return counting(lambda model: model)


def held(live: Live) -> dict[str, torch.Tensor]:
    """All tensors of the run on this rank."""
    tensors = {name: tensor.detach().clone() for name, tensor in live.model.state_dict().items()}
    for index, state in enumerate(live.optimizer.state.values()):
        tensors |= {f"{index}/{key}": value.clone() for key, value in state.items()}
    return tensors


def same(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    assert expected.keys() == found.keys()
    different = [name for name in expected if not torch.equal(expected[name], found[name])]
    assert not different, different


def no_mixture(folder: Path, background: bool, flipped: int | None) -> None:
    """Of a diverged replica, wherever it differs, the checkpoint has rank 0's values alone, with a note."""
    live = WRAPPERS["ddp"](models.build("wide"))
    name, tensor = max(live.model.module.named_parameters(), key=lambda item: item[1].numel())
    with torch.no_grad():
        flat = tensor.view(-1)
        flat[:] = flat + harness.RANK if flipped is None else flat
        flat[flipped or 0] += harness.RANK
    with saver_of(live, folder) as saver:
        saved = saver.save(live.model, folder / "out", background=background)
        report = saved.result() if background else saved
    expected = {n: p.detach() for n, p in live.model.module.state_dict().items()}
    if harness.RANK == 0:
        same(expected, load_file(folder / "out" / "model.safetensors"))
        assert verify(folder / "out").ok
    assert any(name in note and "rank(s) 1" in note for note in report.notes), report.notes
    dist.barrier()


@harness.named
def alike(folder: Path) -> None:
    """Equal replicas give no note; statistics that DDP broadcasts from rank 0 count as equal."""
    live = counting(DistributedDataParallel)
    steps(live, 0, 2)
    assert not torch.equal(live.model.module.norm.running_mean, of_rank_0(live.model.module.norm.running_mean))
    with saver_of(live, folder, on_difference="raise") as saver:
        assert saver.save(live.model, folder / "out").notes == ()
        assert saver.save_state(path=folder / "state").notes == ()
        assert saver.save_state(path=folder / "later", background=True).result().notes == ()


def of_rank_0(tensor: torch.Tensor) -> torch.Tensor:
    sent = tensor.clone() + (0 if harness.RANK == 0 else 1)  # on rank 0 no difference can be seen
    dist.broadcast(sent, 0)
    return sent if harness.RANK else tensor + 1


@harness.named
def refused(folder: Path) -> None:
    live = WRAPPERS["ddp"](models.build("llama"))
    with saver_of(live, folder, on_difference="raise") as saver:
        saver.save(live.model, step=1)
        with torch.no_grad():
            live.model.module.model.norm.weight[-1] += harness.RANK
        for background in (False, True):
            with pytest.raises(RanksDisagreeError, match=r"^model\.norm\.weight on rank\(s\) 1"):
                saver.save(live.model, step=2, background=background)
        with pytest.raises(RanksDisagreeError, match=r"^model\.norm\.weight on rank\(s\) 1"):
            saver.save_state()
    dist.barrier()
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-1"]
    assert verify(latest(folder)).ok


def statistics(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, broadcast_buffers=False)


def ignoring(model: nn.Module) -> nn.Module:
    return fully_shard(model, ignored_params=set(model.last.parameters()))


RUNS = {"local": lambda model: model, "statistics": statistics, "ignoring": ignoring}


def rank_0s_for_all(folder: Path, way: str, background: bool) -> None:
    """A run resumes with rank 0's weights, moments and statistics on all ranks, and says so."""
    live = counting(RUNS[way])
    steps(live, 0, 3)
    with saver_of(live, folder) as saver:
        report = saver.save_state(path=folder / "state", background=background)
        report = report.result() if background else report
    assert any("not as on rank 0, which is stored" in note for note in report.notes), report.notes
    stored = held(live)
    for tensor in stored.values() if way != "ignoring" else ():  # which has shards too
        dist.broadcast(tensor, 0)
    fresh = counting(RUNS[way])
    with saver_of(fresh, folder) as saver:
        report = saver.resume(folder / "state").report
    assert report.problems == (), report
    (line,) = report.differences
    assert line.endswith("not the same on all ranks that saved, all ranks now have rank 0's"), line
    if way != "ignoring":
        same(stored, held(fresh))


@harness.named
def left(folder: Path) -> None:
    """Save a state for another number of ranks."""
    live = local_model()
    steps(live, 0, 3)
    with saver_of(live, folder) as saver:
        saver.save_state(path=folder / "state")
    if harness.RANK == 0:
        torch.save(held(live), folder / "held.pt")


@harness.named
def again_and_alike(folder: Path) -> None:
    """Replicas diverge, are averaged, diverge again; each save is compared by itself."""
    live = local_model()
    with saver_of(live, folder, background=True) as saver:
        for step in range(4):
            steps(live, step, 1)
            if step % 2:
                for tensor in [*live.model.parameters(), *live.model.buffers()]:
                    dist.broadcast(tensor.data, 0)
                for state in live.optimizer.state.values():
                    for value in state.values():
                        dist.broadcast(value, 0)
            report = saver.save_state(path=folder / f"{step}").result()
            assert bool(report.notes) is (step % 2 == 0), (step, report.notes)


class Layers(nn.Module):
    """Two layers whose parameters have distinct shapes, one of them with fewer rows than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 1)


def grid() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def hybrid(model: nn.Module) -> nn.Module:
    settings: dict[str, Any] = {"device_mesh": grid(), "use_orig_params": True, "device_id": torch.device("cpu")}
    return FullyShardedDataParallel(model, sharding_strategy=ShardingStrategy.HYBRID_SHARD, **settings)


def placed(model: nn.Module) -> nn.Module:
    """Shards with replicas in one mesh, replicas on all ranks, and shards of unrelated meshes."""
    mesh = grid()
    layouts = {
        "first.weight": (mesh, [Replicate(), Shard(1)]),
        "first.bias": (mesh["shard"], [Shard(0)]),
        "last.weight": (mesh, [Replicate(), Replicate()]),
        "last.bias": (mesh["shard"], [Replicate()]),
    }
    for name, (where, placements) in layouts.items():
        module, key = model.get_submodule(name.split(".")[0]), name.split(".")[1]
        whole = getattr(module, key).detach()
        setattr(module, key, nn.Parameter(distribute_tensor(whole, where, placements)))
    return model


PARTS = {"hsdp": lambda model: fully_shard(model, mesh=grid()), "hybrid": hybrid, "placed": placed}


def layers(way: str, seed: int = 0) -> Live:
    """A model whose shards are on two or more ranks each, after two steps that are the same on all."""
    torch.manual_seed(seed)
    model = PARTS[way](Layers())
    live = Live(model, adam(model))
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * 0.5
        live.optimizer.step()
    live.optimizer.zero_grad()
    return live


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def parts_held(live: Live) -> dict[str, torch.Tensor]:
    """This rank's shards of weights and moments."""
    tensors = {}
    for name, parameter in live.model.named_parameters():
        tensors[name] = local(parameter.detach()).clone()
        tensors |= {f"{name}/{k}": local(v).clone() for k, v in live.optimizer.state[parameter].items()}
    return tensors


def part_changed(live: Live, name: str, rank: int) -> None:
    """Change one element of a parameter and of its moments on one rank."""
    parameter = next(p for n, p in live.model.named_parameters() if name in n)
    with torch.no_grad():
        for tensor in (parameter, *[value for value in live.optimizer.state[parameter].values() if value.dim()]):
            if rank == harness.RANK:
                local(tensor).view(-1)[-1:] += 1


def parts(folder: Path, way: str, background: bool) -> None:
    """Of a shard with replicas, the first one is stored, and all ranks resume with it."""
    live = layers(way)
    expected = truth(live)
    alike_parts = parts_held(live)
    with saver_of(live, folder, background=background) as saver:
        alike = saver.save_state(path=folder / "alike")
        assert (alike.result() if background else alike).notes == ()
        part_changed(live, "first.weight", 3)
        if way == "placed":
            part_changed(live, "last.weight", 1)
            part_changed(live, "last.bias", 2)
        report = saver.save_state(path=folder / "apart")
        report = report.result() if background else report
    (note,) = report.notes
    assert "first.weight" in note, note
    assert "rank(s) 3" in note, note
    assert note.endswith("which is stored"), note
    if way == "placed":
        assert "rank(s) 1" in note, note
        assert "rank(s) 2" in note, note
    if harness.RANK == 0:
        same(expected, load_file(folder / "apart" / "model.safetensors"))
        assert verify(folder / "apart").ok
    fresh = layers(way, seed=1)
    with saver_of(fresh, folder) as saver:
        progress = saver.resume(folder / "apart")
        assert progress.report.problems == (), progress.report
        (line,) = progress.report.differences
        assert "first.weight" in line, line
    same(alike_parts, parts_held(fresh))
    with (
        saver_of(live, folder, on_difference="raise") as saver,
        pytest.raises(RanksDisagreeError, match=r"first\.weight.* on rank\(s\) 3"),
    ):
        saver.save_state(path=folder / "refused", background=background)
    assert not (folder / "refused").exists()


def settings(folder: Path, background: bool) -> None:
    """Hyperparameters and counts of an optimizer that differ between ranks are noted as long as they differ."""
    live = local_model()
    first = live.model.first.weight
    with saver_of(live, folder, background=background) as saver:

        def notes(name: str) -> tuple[str, ...]:
            report = saver.save_state(path=folder / name)
            return (report.result() if background else report).notes

        assert notes("alike") == ()
        assert notes("known") == ()
        live.optimizer.param_groups[0]["lr"] *= 1 + harness.RANK
        (note,) = notes("settings")
        assert "optimizer: lr of group 0 on rank(s) 1: not as on rank 0" in note, note
        live.optimizer.state[first]["looks"] = 5 + harness.RANK
        (note,) = notes("state")
        assert "lr of group 0" in note, note
        assert "first.weight: looks on rank(s) 1" in note, note
        fresh = local_model()
        with saver_of(fresh, folder) as other:
            report = other.resume(folder / "state").report
        assert report.problems == ()
        (line,) = report.differences
        assert "optimizer: lr of group 0" in line, line
        assert "optimizer: first.weight: looks" in line, line
        assert fresh.optimizer.param_groups[0]["lr"] == 0.01
        assert fresh.optimizer.state[fresh.model.first.weight]["looks"] == 5
        live.optimizer.state[first]["looks"] = 0
        live.optimizer.param_groups[0]["lr"] = 0.5
        assert notes("alike_again") == ()
    live.optimizer.param_groups[0]["lr"] *= 1 + harness.RANK
    with (
        saver_of(live, folder, background=background, on_difference="raise") as saver,
        pytest.raises(RanksDisagreeError, match=r"optimizer: lr of group 0 on rank\(s\) 1"),
    ):
        saver.save_state(path=folder / "refused")
    assert not (folder / "refused").exists()


@harness.named
def experts(folder: Path) -> None:
    """DeepSpeed's experts have the same names on all ranks, but different values."""
    model = local_model().model
    for parameter in model.last.parameters():
        parameter.allreduce, parameter.group_name = False, "ep_size_2"
    with pytest.raises(IncompleteError, match=r"last\.weight, last\.bias: an expert of this rank alone"):
        CheckpointSaver(None, folder, **SHORT).save(model, folder / "out")
    for parameter in model.last.parameters():
        parameter.group_name = "ep_size_1"
    CheckpointSaver(None, folder, **SHORT).save(model, folder / "out")


@harness.named
def one_sided(folder: Path) -> None:
    """An object that only one rank has registered, or that is of another kind on one rank."""
    live = local_model()
    average = torch.optim.swa_utils.AveragedModel(live.model)
    for background in (False, True):
        with saver_of(live, folder, background=background) as saver:
            if harness.RANK == 0:
                saver.register(logger=torch.optim.lr_scheduler.ConstantLR(live.optimizer))
            saver.register(ema=average if harness.RANK else torch.optim.lr_scheduler.ConstantLR(live.optimizer))
            with pytest.raises(RanksDisagreeError) as told:
                saver.save_state(path=folder / "out")
            assert "logger: object on rank(s) 0, absent on rank(s) 1" in str(told.value)
            assert "ema: object on rank(s) 0, model on rank(s) 1" in str(told.value)
    assert not list(folder.glob("[!.]*"))


CASES: dict[str, Any] = {
    "settings": lambda folder: settings(folder, False),
    "settings_background": lambda folder: settings(folder, True),
    "mixture": lambda folder: no_mixture(folder, False, None),
    "mixture_background": lambda folder: no_mixture(folder, True, None),
    "one_element": lambda folder: no_mixture(folder, False, 12345),
    "one_element_background": lambda folder: no_mixture(folder, True, -1),
    **{
        f"all/{way}/{'background' if background else 'foreground'}": lambda folder, way=way, background=background: (
            rank_0s_for_all(folder, way, background)
        )
        for way in RUNS
        for background in (False, True)
    },
    **{
        f"parts/{way}/{'background' if background else 'foreground'}": lambda folder, way=way, background=background: (
            parts(folder, way, background)
        )
        for way in PARTS
        for background in (False, True)
    },
}


def case(name: str, folder: Path) -> None:
    (CASES.get(name) or harness.NAMED[name])(folder)


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    harness.run(case)
    sys.exit()
