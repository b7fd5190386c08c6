"""Optimizers go on bit for bit after a resume, or are refused by name: small ones, torch's and pytorch_optimizer's."""

import copy
import importlib.util
import math
from collections import deque

import models
import numpy as np
import pytest
import torch
import wrappers
from on_ranks import RANK, on_ranks
from optimizers import SMALL, Small
from torch import nn
from wrappers import WRAPPERS, truth

from ft_ckpt import CheckpointSaver
from ft_ckpt.distributed.wrappers import is_distributed
from ft_ckpt.errors import CheckpointError, SelectionError
from ft_ckpt.training.state import merge_descriptions

QUIET = {"on_difference": "ignore"}
TORCH = ["ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop"]
TORCH += ["Rprop", "SGD"]
# Some take other arguments than parameters and a rate, or a step of another kind; the others keep objects of their own.
UNTRIED = {"adalomo", "alig", "bsam", "demo", "distributedmuon", "lomo", "spectralsphere"}
MAKE_OBJECTS = {"conda", "scalableshampoo"}
REFUSED = MAKE_OBJECTS | {"lbfgs", "magma", "ranger21", "spam", "stablespam"}
BY_GROUPS = {"adago", "adamuon", "muon", "muonclip", "normuon"}
ARGUMENTS = {"ranger21": {"lr": 1e-3, "num_iterations": 10}}
SECOND_ORDER = {"adahessian", "sophiah"}


def foreign_names():
    if importlib.util.find_spec("pytorch_optimizer") is None:
        return []
    from pytorch_optimizer import get_supported_optimizers

    return sorted(set(get_supported_optimizers()) - UNTRIED)


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 3, bias=False))


def matrices():
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 6, bias=False), nn.Tanh(), nn.Linear(6, 3, bias=False))


def made_foreign(name, model):
    from pytorch_optimizer import load_optimizer

    wide = [p for p in model.parameters() if p.ndim > 1]
    narrow = [p for p in model.parameters() if p.ndim < 2]
    groups = model if name == "adammini" else list(model.parameters())
    if name in BY_GROUPS:
        groups = [{"params": wide, "use_muon": True}, {"params": narrow, "use_muon": False}]
    return load_optimizer(name)(groups, **ARGUMENTS.get(name, {"lr": 1e-3}))


def learn(model, optimizer, number, second_order=False):
    torch.manual_seed(100 + number)
    rows = torch.randn(5, 1, 4, 4)

    def closure():
        loss = model(rows).square().mean()
        loss.backward(create_graph=second_order)
        return loss

    optimizer.zero_grad()
    loss = closure()
    try:
        optimizer.step()
    except (TypeError, ValueError, RuntimeError):  # one that steps through a closure alone
        optimizer.zero_grad()
        loss = optimizer.step(closure)
    return float(loss.detach())


def steps(tensor):
    """The strides of the dimensions with several elements."""
    return [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def same(one, other):
    """Whether two trees are equal bit for bit, their tensors in shape, dtype and order in memory too."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        if (one.shape, one.dtype, steps(one)) != (other.shape, other.dtype, steps(other)):
            return False
        return torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or (isinstance(one, float) and math.isnan(one) and math.isnan(other))


def goes_on(folder, model_of, optimizer_of, **learning):
    """Whether a run that is killed after three steps and resumed is the uninterrupted one."""
    whole = model_of()
    optimizer = optimizer_of(whole)
    for number in range(6):
        learn(whole, optimizer, number, **learning)
    killed = model_of()
    optimizer = optimizer_of(killed)
    saver = CheckpointSaver(None, folder, every=3, **QUIET)
    saver.register(model=killed, optimizer=optimizer)
    for number in range(3):
        learn(killed, optimizer, number, **learning)
        saver.step()
    before = copy.deepcopy(optimizer.state_dict())
    fresh = model_of()
    again = optimizer_of(fresh)
    CheckpointSaver(None, folder, **QUIET).resume("must", model=fresh, optimizer=again)
    is_restored = same(before, again.state_dict())
    for number in range(3, 6):
        learn(fresh, again, number, **learning)
    return is_restored and same(whole.state_dict(), fresh.state_dict())


@pytest.mark.parametrize("name", SMALL)
def test_small_ones(tmp_path, name):
    assert goes_on(tmp_path, network, lambda model: SMALL[name](model.parameters()))


@pytest.mark.parametrize("name", SMALL)
def test_resumed_before_their_first_step_and_taken_back(tmp_path, name):
    """What a later step has made of a setting does not stay."""
    model = network()
    optimizer = SMALL[name](model.parameters())
    saver = CheckpointSaver(None, tmp_path, **QUIET)
    saver.save_state(model, optimizer=optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    learn(model, optimizer, 0)
    saver.resume("must")
    assert same(before, optimizer.state_dict())


@pytest.mark.sample("Muon", "ASGD")
@pytest.mark.parametrize("name", TORCH)
def test_those_of_torch(tmp_path, name):
    cls, model_of = getattr(torch.optim, name), matrices if name == "Muon" else network
    assert goes_on(tmp_path, model_of, lambda model: cls(model.parameters(), lr=0.01))
    rate = torch.tensor([0.01], dtype=torch.float64)
    if name in ("Adam", "AdamW"):
        wide = lambda model: cls(model.parameters(), lr=rate.clone(), foreach=False)  # noqa: E731
        assert goes_on(tmp_path / "tensor", model_of, wide)


@pytest.mark.slow
@pytest.mark.parametrize("name", foreign_names())
def test_those_of_pytorch_optimizer(tmp_path, name):
    second_order = name in SECOND_ORDER
    if name not in REFUSED:
        assert goes_on(tmp_path, network, lambda model: made_foreign(name, model), second_order=second_order)
        return
    model = network()
    optimizer, saver = made_foreign(name, model), CheckpointSaver(None, tmp_path, every=9, **QUIET)
    if name not in MAKE_OBJECTS:
        with pytest.raises(SelectionError, match=r"optimizer: its state .*: cannot be saved"):
            saver.register(model=model, optimizer=optimizer)
        return
    saver.register(model=model, optimizer=optimizer)
    learn(model, optimizer, 0)
    with pytest.raises(SelectionError, match=r"0\.weight: pre_conditioner: |2\.weight: projector: "):
        saver.step()


class Unusual(Small):
    """State or settings with a value that cannot be kept."""

    def __init__(self, parameters, value, key="held"):
        self.value, self.key = value, key
        super().__init__(parameters)

    def update(self, parameter, gradient, group):
        self.state[parameter][self.key] = self.value
        return gradient


CASES = {
    "an object": (object(), "held", r"0\.weight: held: builtins\.object"),
    "an object in a list": ([torch.zeros(2), object()], "held", r"0\.weight: held\[1\]: builtins\.object"),
    "an array": ([np.zeros(2)], "held", "held: a numpy array of float64"),
    "a sparse tensor": ({"a": torch.zeros(2).to_sparse()}, "held", "a tensor of layout torch.sparse_coo"),
    "a number as a key": (torch.zeros(2), 7, "7: a key of type int, expected str"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_kept_is_refused_at_the_first_step(tmp_path, case):
    """Found out at the first save, hundreds of steps later."""
    value, key, words = CASES[case]
    model = network()
    saver = CheckpointSaver(None, tmp_path, every=500)
    optimizer = Unusual(model.parameters(), value, key)
    saver.register(model=model, optimizer=optimizer)
    learn(model, optimizer, 0)
    with pytest.raises(SelectionError, match=words):
        saver.step()


def test_settings_that_cannot_be_kept_are_refused_when_they_are_registered(tmp_path):
    model = network()
    for value, words in ((object(), "builtins.object"), ([learn], "function"), (torch.zeros(1 << 19), "2,097,152 byt")):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.param_groups[0]["odd"] = value
        with pytest.raises(SelectionError, match=rf"optimizer: group 0: odd.*{words}"):
            CheckpointSaver(None, tmp_path).register(model=model, optimizer=optimizer)


def described(entry):
    return {"class": "SOAP", "groups": [], "state": {"weight": {"sides": entry}}}


def test_containers_with_other_tensors_on_some_ranks_are_refused():
    leaf = {"shape": [2], "dtype": "float32", "host": False}
    entry = {"tree": ["list", ["tensor", 0]], "leaves": [leaf]}
    for other in ({"tree": ["list"], "leaves": []}, {"value": []}, {**entry, "leaves": [{**leaf, "shape": [3]}]}):
        with pytest.raises(SelectionError, match="weight: sides: the container has other tensors on rank 1"):
            merge_descriptions([described(entry), described(other)])
    other = {"tree": ["list", ["tensor", 0], 1], "leaves": [leaf]}
    merged = merge_descriptions([described(entry), described(other)])
    assert merged["state"]["weight"]["sides"] == entry
    assert merged["differing"] == {"weight: sides": [1]}


class ScheduleFree(torch.optim.SGD):
    """Weights that `train` and `eval` move between the point of training and the average."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.param_groups[0]["train_mode"] = True

    def train(self):
        self.param_groups[0]["train_mode"] = True

    def eval(self):
        self.param_groups[0]["train_mode"] = False


def test_weights_of_a_schedule_free_optimizer_in_training_are_named(tmp_path):
    """The point of training was saved as the final model without a word."""
    model, other = network(), network()
    optimizer = ScheduleFree(model.parameters())
    with CheckpointSaver(None, tmp_path, **QUIET) as saver:
        saver.register(model=model, optimizer=optimizer)
        learn(model, optimizer, 0)
        words = "ScheduleFree is in train mode: the weights are the point of training, not the average"
        assert saver.save(model, tmp_path / "trained").notes[0].startswith(words)
        assert saver.save_state().notes[0].startswith(words)
        assert saver.save(other, tmp_path / "other").notes == ()
        optimizer.eval()
        assert saver.save(model, tmp_path / "averaged").notes == ()


TOLD = {"enter_timeout_seconds": 60, "on_difference": "ignore"}


class OfShards(Small):
    """A list with a matrix of this rank's own elements."""

    def update(self, parameter, gradient, group):
        part = gradient.to_local() if is_distributed(gradient) else gradient  # type: ignore[attr-defined]
        flat = part.flatten()[:3]
        self.state[parameter]["sides"] = [torch.outer(flat, flat)]
        return gradient


def under(wrapper, optimizer, seed):
    wrappers.adam = lambda model: optimizer([p for p in model.parameters() if p.requires_grad])
    return WRAPPERS[wrapper](models.build("llama", seed))


def saver_of(live, folder):
    saver = CheckpointSaver(live.accelerator, folder, every=2, **TOLD)
    saver.register(model=live.model, optimizer=live.optimizer)
    return saver


def train_on_ranks(live, saver, first, count):
    losses = []
    for step in range(first, first + count):
        losses.append(live.step(models.batch(seed=97 * step + RANK)))
        saver.step()
    return losses


def optimizer_named(name):
    return SMALL.get(name) or getattr(torch.optim, name)


WRAPPED = [("preconditioned", "ddp"), ("turned", "ddp")]
WRAPPED += [(name, wrapper) for name in ("nested", "settings") for wrapper in ("ddp", "fsdp1", "fsdp1_flat", "fsdp2")]


@pytest.mark.sample("preconditioned-ddp", "nested-fsdp2")
@pytest.mark.parametrize(("optimizer", "wrapper"), WRAPPED)
@on_ranks(2, timeout=280)
def test_on_two_ranks(tmp_path, optimizer, wrapper):
    exact(tmp_path, wrapper, optimizer_named(optimizer))


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["fsdp1", "fsdp2"])
@on_ranks(2)
def test_matrices_of_shards_are_refused(tmp_path, wrapper):
    refused(tmp_path, wrapper)


under_zero = on_ranks(2, group_seconds=None, env={"DS_ACCELERATOR": "cpu"}, timeout=280)
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs the deepspeed extra")


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize("wrapper", ["zero1", "zero3"])
@under_zero
def test_under_zero(tmp_path, wrapper):
    exact(tmp_path, wrapper, optimizer_named("settings"))


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize("wrapper", ["zero1", "zero2", "zero3"])
@under_zero
def test_matrices_of_shards_are_refused_under_zero(tmp_path, wrapper):
    refused(tmp_path, wrapper)


def exact(folder, wrapper, optimizer):
    live = under(wrapper, optimizer, 0)
    with saver_of(live, folder) as saver:
        train_on_ranks(live, saver, 0, 2)
        expected = train_on_ranks(live, saver, 2, 2)
    fresh = under(wrapper, optimizer, 1)
    with saver_of(fresh, folder) as saver:
        assert saver.resume("checkpoint-2").report.problems == ()
        assert train_on_ranks(fresh, saver, 2, 2) == expected
    before, after = truth(live), truth(fresh)
    assert all(torch.equal(before[name], after[name]) for name in before)


def refused(folder, wrapper):
    """On all ranks, also where one of them has no elements of a parameter."""
    live = under(wrapper, OfShards, 0)
    saver = saver_of(live, folder)
    with pytest.raises(CheckpointError, match=r"sides: .*not cut like the parameter|sides: list|rank \d"):
        train_on_ranks(live, saver, 0, 1)
