"""What every rank should hold alike is compared: rank 0's is saved and resumed, and differences are
named.
"""

import models
import pytest
import torch
import torch.distributed as dist
from on_ranks import RANK, call_on_ranks, on_ranks
from safetensors.torch import load_file
from seeds import chosen_seed
from shared_shards import PARTS, layers, local, local_parts
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from wrappers import WRAPPERS, Live, adam, truth

from ft_ckpt import CheckpointSaver, latest, verify
from ft_ckpt.errors import IncompleteError, RanksDisagreeError
from ft_ckpt.ranks.moving.replicas import folded_bits

SHORT = {"enter_timeout_seconds": 30, "each_rank_writes": "on", "on_difference": "ignore"}


def saver_of(live, folder, **settings):
    saver = CheckpointSaver(live.accelerator, folder, **{**SHORT, **settings})
    saver.register(model=live.model, optimizer=live.optimizer)
    return saver


class Counting(nn.Module):
    """A layer with statistics of what it has seen."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, rows):
        return self.last(self.norm(self.first(rows)))


def steps(live, first, count):
    losses = []
    for step in range(first, first + count):
        rows = torch.randn(4, 3, generator=torch.Generator().manual_seed(97 * step + RANK))
        loss = live.model(rows).square().mean()
        loss.backward()
        live.optimizer.step()
        live.optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def counting(wrap):
    torch.manual_seed(0)
    model = wrap(Counting())
    return Live(model, adam(model))


def local_model():
    """As LocalSGD leaves it between two averages: without communication of the ranks."""
    return counting(lambda model: model)


def held(live):
    """All tensors of the run on this rank."""
    tensors = {name: tensor.detach().clone() for name, tensor in live.model.state_dict().items()}
    for index, state in enumerate(live.optimizer.state.values()):
        tensors |= {f"{index}/{key}": value.clone() for key, value in state.items()}
    return tensors


def same(expected, found):
    assert expected.keys() == found.keys()
    different = [name for name in expected if not torch.equal(expected[name], found[name])]
    assert not different, different


WHEN = pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])


@pytest.mark.sample("None-foreground")
@WHEN
@pytest.mark.parametrize("flipped", [None, 12345, -1])
@on_ranks(2)
def test_no_mixture_of_replicas_is_stored(tmp_path, flipped, background):
    """Of a diverged replica, wherever it differs, the checkpoint has rank 0's values alone, with a
    note.
    """
    live = WRAPPERS["ddp"](models.build("wide"))
    name, tensor = max(live.model.module.named_parameters(), key=lambda item: item[1].numel())
    with torch.no_grad():
        flat = tensor.view(-1)
        flat[:] = flat + RANK if flipped is None else flat
        flat[flipped or 0] += RANK
    with saver_of(live, tmp_path) as saver:
        saved = saver.save(live.model, tmp_path / "out", background=background)
        report = saved.result() if background else saved
    expected = {n: p.detach() for n, p in live.model.module.state_dict().items()}
    if RANK == 0:
        same(expected, load_file(tmp_path / "out" / "model.safetensors"))
        assert verify(tmp_path / "out").ok
    assert any(name in note and "rank(s) 1" in note for note in report.notes), report.notes
    dist.barrier()


@on_ranks(2)
def test_equal_replicas_give_no_note(tmp_path):
    """Equal replicas give no note; statistics that DDP broadcasts from rank 0 count as equal."""
    live = counting(DistributedDataParallel)
    steps(live, 0, 2)
    assert not torch.equal(
        live.model.module.norm.running_mean, of_rank_0(live.model.module.norm.running_mean)
    )
    with saver_of(live, tmp_path, on_difference="raise") as saver:
        assert saver.save(live.model, tmp_path / "out").notes == ()
        assert saver.save_state(path=tmp_path / "state").notes == ()
        assert saver.save_state(path=tmp_path / "later", background=True).result().notes == ()


def of_rank_0(tensor):
    sent = tensor.clone() + (0 if RANK == 0 else 1)  # on rank 0 no difference can be seen
    dist.broadcast(sent, 0)
    return sent if RANK else tensor + 1


@on_ranks(2)
def test_a_difference_is_refused(tmp_path):
    live = WRAPPERS["ddp"](models.build("llama"))
    with saver_of(live, tmp_path, on_difference="raise") as saver:
        saver.save(live.model, step=1)
        with torch.no_grad():
            live.model.module.model.norm.weight[-1] += RANK
        for background in (False, True):
            with pytest.raises(RanksDisagreeError, match=r"^model\.norm\.weight on rank\(s\) 1"):
                saver.save(live.model, step=2, background=background)
        with pytest.raises(RanksDisagreeError, match=r"^model\.norm\.weight on rank\(s\) 1"):
            saver.save_state()
    dist.barrier()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]
    assert verify(latest(tmp_path)).ok


def statistics(model):
    return DistributedDataParallel(model, broadcast_buffers=False)


def ignoring(model):
    return fully_shard(model, ignored_params=set(model.last.parameters()))


RUNS = {"local": lambda model: model, "statistics": statistics, "ignoring": ignoring}


@pytest.mark.sample("statistics-background")
@WHEN
@pytest.mark.parametrize("way", RUNS)
@on_ranks(2)
def test_all_ranks_resume_with_what_rank_0_had(tmp_path, way, background):
    """A run resumes with rank 0's weights, moments and statistics on all ranks, and says so."""
    live = counting(RUNS[way])
    steps(live, 0, 3)
    with saver_of(live, tmp_path) as saver:
        report = saver.save_state(path=tmp_path / "state", background=background)
        report = report.result() if background else report
    assert any("not as on rank 0, which is stored" in note for note in report.notes), report.notes
    stored = held(live)
    for tensor in stored.values() if way != "ignoring" else ():  # which has shards too
        dist.broadcast(tensor, 0)
    fresh = counting(RUNS[way])
    with saver_of(fresh, tmp_path) as saver:
        report = saver.resume(tmp_path / "state").report
    assert report.problems == (), report
    (line,) = report.differences
    assert line.endswith("not the same on all ranks that saved, all ranks now have rank 0's"), line
    if way != "ignoring":
        same(stored, held(fresh))


def leave(folder):
    """Save a state for another number of ranks."""
    live = local_model()
    steps(live, 0, 3)
    with saver_of(live, folder) as saver:
        saver.save_state(path=folder / "state")
    if RANK == 0:
        torch.save(held(live), folder / "held.pt")


def test_another_number_of_ranks_has_rank_0s_and_says_so(tmp_path):
    call_on_ranks(2, leave, tmp_path)
    model = nn.ModuleDict(
        {"first": nn.Linear(3, 8), "norm": nn.BatchNorm1d(8), "last": nn.Linear(8, 1)}
    )
    optimizer = torch.optim.AdamW(model.parameters())
    with CheckpointSaver(None, tmp_path, on_difference="ignore") as saver:
        report = saver.resume(tmp_path / "state", model=model, optimizer=optimizer).report
    assert report.problems == ()
    assert any("first.weight" in line and "rank 0's" in line for line in report.differences), report
    expected = torch.load(tmp_path / "held.pt")
    assert all(torch.equal(expected[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.slow
@on_ranks(2)
def test_each_save_is_compared_by_itself(tmp_path):
    """Replicas diverge, are averaged, diverge again; each save is compared by itself."""
    live = local_model()
    with saver_of(live, tmp_path, background=True) as saver:
        for step in range(4):
            steps(live, step, 1)
            if step % 2:
                for tensor in [*live.model.parameters(), *live.model.buffers()]:
                    dist.broadcast(tensor.data, 0)
                for state in live.optimizer.state.values():
                    for value in state.values():
                        dist.broadcast(value, 0)
            report = saver.save_state(path=tmp_path / f"{step}").result()
            assert bool(report.notes) is (step % 2 == 0), (step, report.notes)


def part_changed(live, name, rank):
    """Change one element of a parameter and of its moments on one rank."""
    parameter = next(p for n, p in live.model.named_parameters() if name in n)
    with torch.no_grad():
        for tensor in (
            parameter,
            *[value for value in live.optimizer.state[parameter].values() if value.dim()],
        ):
            if rank == RANK:
                local(tensor).view(-1)[-1:] += 1


@pytest.mark.slow
@WHEN
@pytest.mark.parametrize("way", PARTS)
@on_ranks(4)
def test_of_a_shard_with_replicas_the_first_is_stored(tmp_path, way, background):
    """Of a shard with replicas, the first one is stored, and all ranks resume with it."""
    live = layers(way)
    expected = truth(live)
    alike_parts = local_parts(live)
    with saver_of(live, tmp_path, background=background) as saver:
        alike = saver.save_state(path=tmp_path / "alike")
        assert (alike.result() if background else alike).notes == ()
        part_changed(live, "first.weight", 3)
        if way == "placed":
            part_changed(live, "last.weight", 1)
            part_changed(live, "last.bias", 2)
        report = saver.save_state(path=tmp_path / "apart")
        report = report.result() if background else report
    (note,) = report.notes
    assert "first.weight" in note, note
    assert "rank(s) 3" in note, note
    assert note.endswith("which is stored"), note
    if way == "placed":
        assert "rank(s) 1" in note, note
        assert "rank(s) 2" in note, note
    if RANK == 0:
        same(expected, load_file(tmp_path / "apart" / "model.safetensors"))
        assert verify(tmp_path / "apart").ok
    fresh = layers(way, seed=1)
    with saver_of(fresh, tmp_path) as saver:
        progress = saver.resume(tmp_path / "apart")
        assert progress.report.problems == (), progress.report
        (line,) = progress.report.differences
        assert "first.weight" in line, line
    same(alike_parts, local_parts(fresh))
    with (
        saver_of(live, tmp_path, on_difference="raise") as saver,
        pytest.raises(RanksDisagreeError, match=r"first\.weight.* on rank\(s\) 3"),
    ):
        saver.save_state(path=tmp_path / "refused", background=background)
    assert not (tmp_path / "refused").exists()


@pytest.mark.sample("foreground")
@WHEN
@on_ranks(2)
def test_settings_of_an_optimizer_that_differ_are_noted(tmp_path, background):
    """Hyperparameters and counts of an optimizer that differ between ranks are noted as long as
    they differ.
    """
    live = local_model()
    first = live.model.first.weight
    with saver_of(live, tmp_path, background=background) as saver:

        def notes(name):
            report = saver.save_state(path=tmp_path / name)
            return (report.result() if background else report).notes

        assert notes("alike") == ()
        assert notes("known") == ()
        live.optimizer.param_groups[0]["lr"] *= 1 + RANK
        (note,) = notes("settings")
        assert "optimizer: lr of group 0 on rank(s) 1: not as on rank 0" in note, note
        live.optimizer.state[first]["looks"] = 5 + RANK
        (note,) = notes("state")
        assert "lr of group 0" in note, note
        assert "first.weight: looks on rank(s) 1" in note, note
        fresh = local_model()
        with saver_of(fresh, tmp_path) as other:
            report = other.resume(tmp_path / "state").report
        assert report.problems == ()
        (line,) = report.differences
        assert "optimizer: lr of group 0" in line, line
        assert "optimizer: first.weight: looks" in line, line
        assert fresh.optimizer.param_groups[0]["lr"] == 0.01
        assert fresh.optimizer.state[fresh.model.first.weight]["looks"] == 5
        live.optimizer.state[first]["looks"] = 0
        live.optimizer.param_groups[0]["lr"] = 0.5
        assert notes("alike_again") == ()
    live.optimizer.param_groups[0]["lr"] *= 1 + RANK
    with (
        saver_of(live, tmp_path, background=background, on_difference="raise") as saver,
        pytest.raises(RanksDisagreeError, match=r"optimizer: lr of group 0 on rank\(s\) 1"),
    ):
        saver.save_state(path=tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


@on_ranks(2)
def test_an_expert_of_one_rank_is_refused(tmp_path):
    """DeepSpeed's experts have the same names on all ranks, but different values."""
    model = local_model().model
    for parameter in model.last.parameters():
        parameter.allreduce, parameter.group_name = False, "ep_size_2"
    with pytest.raises(
        IncompleteError, match=r"last\.weight, last\.bias: an expert of this rank alone"
    ):
        CheckpointSaver(None, tmp_path, **SHORT).save(model, tmp_path / "out")
    for parameter in model.last.parameters():
        parameter.group_name = "ep_size_1"
    CheckpointSaver(None, tmp_path, **SHORT).save(model, tmp_path / "out")


@on_ranks(2)
def test_an_object_of_one_rank_is_refused(tmp_path):
    """An object that only one rank has registered, or that is of another kind on one rank."""
    live = local_model()
    average = torch.optim.swa_utils.AveragedModel(live.model)
    for background in (False, True):
        with saver_of(live, tmp_path, background=background) as saver:
            if RANK == 0:
                saver.register(logger=torch.optim.lr_scheduler.ConstantLR(live.optimizer))
            saver.register(
                ema=average if RANK else torch.optim.lr_scheduler.ConstantLR(live.optimizer)
            )
            with pytest.raises(RanksDisagreeError) as told:
                saver.save_state(path=tmp_path / "out")
            assert "logger: object on rank(s) 0, absent on rank(s) 1" in str(told.value)
            assert "ema: object on rank(s) 0, model on rank(s) 1" in str(told.value)
    assert not list(tmp_path.glob("[!.]*"))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.complex64]
)
def test_digest_made_on_a_device_tells_every_bit_and_place(dtype):
    """Each single bit, two elements that change places, and zeros in the middle or at the end."""
    draws = torch.Generator().manual_seed(chosen_seed())
    data = torch.randint(0, 2, (131 * dtype.itemsize,), dtype=torch.uint8, generator=draws)
    seen = {int(folded_bits(data.view(dtype)))}
    for place in range(data.numel()):
        for bit in range(1 if dtype is torch.bool else 8):
            other = data.clone()
            other[place] ^= 1 << bit
            seen.add(int(folded_bits(other.view(dtype))))
    assert len(seen) == 1 + data.numel() * (1 if dtype is torch.bool else 8)
    assert int(folded_bits(data.view(dtype))) == int(
        folded_bits(torch.cat([data, data])[data.numel() :].view(dtype))
    )
    swapped = torch.arange(32)
    assert int(folded_bits(swapped)) != int(folded_bits(swapped.flip(0)))
    assert int(folded_bits(swapped)) != int(folded_bits(swapped[torch.arange(32) ^ 1]))
