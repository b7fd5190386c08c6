"""Optimizers of every kind go on bit for bit after a resume, or are refused by name."""

import copy
import importlib.util
import math
from collections import deque

import models
import numpy as np
import pytest
import torch
import wrappers
from hypothesis import HealthCheck, given, seed, settings, strategies as st
from on_ranks import RANK, call_on_ranks, on_ranks
from optimizers import KINDS, Around, ScheduleFree, Small, matrices, network
from seeds import chosen_seed, examples
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from wrappers import WRAPPERS, truth

from ft_ckpt import CheckpointSaver
from ft_ckpt.errors import CheckpointError, LoadError, SelectionError
from ft_ckpt.ranks.wrappers import is_distributed
from ft_ckpt.runs.optimizers import merge_descriptions

QUIET = {"on_difference": "ignore"}


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


def same(left, right):
    """Whether two trees are equal bit for bit, their tensors in shape, dtype and order in memory
    too.
    """
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        if (left.shape, left.dtype, steps(left)) != (right.shape, right.dtype, steps(right)):
            return False
        return torch.equal(torch.nan_to_num(left), torch.nan_to_num(right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple, deque)):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right or (isinstance(left, float) and math.isnan(left) and math.isnan(right))


def goes_on(folder, model_of, optimizer_of, **learning):
    """Whether a run that is killed after three steps and resumed is the uninterrupted one."""
    whole = model_of()
    optimizer = optimizer_of(whole)
    for number in range(6):
        learn(whole, optimizer, number, **learning)
    killed = model_of()
    optimizer = optimizer_of(killed)
    with CheckpointSaver(None, folder, every=3, background=True, **QUIET) as saver:
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


@pytest.fixture
def model_of(kind):
    return matrices if kind == "Muon" else network


OF_OWN_FORM = [*("preconditioned", "nested", "settings", "turned", "global", "around"), "in_8_bits"]


@pytest.mark.parametrize("kind", KINDS)
class TestEachKind:
    """What a run may expect of any optimizer."""

    @pytest.mark.sample(*OF_OWN_FORM, "Muon", "ASGD", "fused", "tensor_rate")
    def test_goes_on_to_the_bit(self, tmp_path, kind, model_of):
        assert goes_on(tmp_path, model_of, lambda model: KINDS[kind](model.parameters()))

    @pytest.mark.sample(*OF_OWN_FORM, "AdamW")
    def test_going_back_before_the_first_step_leaves_nothing_of_later_ones(
        self, tmp_path, kind, model_of
    ):
        """Moments, step counts, settings and gradients of what came after stayed."""
        model = model_of()
        optimizer = KINDS[kind](model.parameters())
        saver = CheckpointSaver(None, tmp_path, **QUIET)
        saver.save_state(model, optimizer=optimizer)
        before = copy.deepcopy(optimizer.state_dict())
        expected = [learn(model, optimizer, number) for number in range(2)]
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, float("nan"))
        saver.resume("must")
        assert same(before, optimizer.state_dict())
        assert all(parameter.grad is None for parameter in model.parameters())
        assert [learn(model, optimizer, number) for number in range(2)] == expected

    @pytest.mark.sample("nested", "AdamW", "in_8_bits")
    def test_state_follows_the_names_of_parameters(self, tmp_path, kind, model_of):
        """In another order, and in part of the model alone it is refused."""
        model = model_of()
        optimizer = KINDS[kind](model.parameters())
        saver = CheckpointSaver(None, tmp_path, **QUIET)
        saver.save_state(model, optimizer=optimizer)
        learn(model, optimizer, 0)
        saver.save_state()
        expected = learn(model, optimizer, 1), learn(model, optimizer, 2)
        fresh = model_of()
        reordered = KINDS[kind](list(fresh.parameters())[::-1])
        CheckpointSaver(None, tmp_path, **QUIET).resume("must", model=fresh, optimizer=reordered)
        assert (learn(fresh, reordered, 1), learn(fresh, reordered, 2)) == expected
        part = KINDS[kind](list(fresh.parameters())[:-1])
        name = [name for name, _ in fresh.named_parameters()][-1]
        with pytest.raises(
            LoadError, match=f"{name}: in the checkpoint's optimizer, not trained here"
        ):
            CheckpointSaver(None, tmp_path, **QUIET).resume("must", model=fresh, optimizer=part)


# Some take other arguments than parameters and a rate, or a step of another kind; the others keep
# objects of their own.
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


def make_foreign(name, model):
    from pytorch_optimizer import load_optimizer

    wide = [p for p in model.parameters() if p.ndim > 1]
    narrow = [p for p in model.parameters() if p.ndim < 2]
    groups = model if name == "adammini" else list(model.parameters())
    if name in BY_GROUPS:
        groups = [{"params": wide, "use_muon": True}, {"params": narrow, "use_muon": False}]
    return load_optimizer(name)(groups, **ARGUMENTS.get(name, {"lr": 1e-3}))


@pytest.mark.slow
@pytest.mark.parametrize("name", foreign_names())
def test_those_of_pytorch_optimizer(tmp_path, name):
    second_order = name in SECOND_ORDER
    if name not in REFUSED:
        assert goes_on(
            tmp_path, network, lambda model: make_foreign(name, model), second_order=second_order
        )
        return
    model = network()
    optimizer, saver = make_foreign(name, model), CheckpointSaver(None, tmp_path, every=9, **QUIET)
    if name not in MAKE_OBJECTS:
        with pytest.raises(SelectionError, match=r"optimizer: its state .*: cannot be saved"):
            saver.register(model=model, optimizer=optimizer)
        return
    saver.register(model=model, optimizer=optimizer)
    learn(model, optimizer, 0)
    with pytest.raises(
        SelectionError, match=r"0\.weight: pre_conditioner: |2\.weight: projector: "
    ):
        saver.step()


class Unusual(Small):
    """State or settings with a value that cannot be kept."""

    def __init__(self, parameters, value, key="kept"):
        self.value, self.key = value, key
        super().__init__(parameters)

    def update(self, parameter, gradient, group):
        self.state[parameter][self.key] = self.value
        return gradient


REFUSED_AT_A_STEP = {
    "an object": (object(), "kept", r"0\.weight: kept: builtins\.object"),
    "an object in a list": (
        [torch.zeros(2), object()],
        "kept",
        r"0\.weight: kept\[1\]: builtins\.object",
    ),
    "an array": ([np.zeros(2)], "kept", "kept: a numpy array of float64"),
    "a sparse tensor": (
        {"a": torch.zeros(2).to_sparse()},
        "kept",
        "a tensor of layout torch.sparse_coo",
    ),
    "a number as a key": (torch.zeros(2), 7, "7: a key of type int, expected str"),
}


@pytest.mark.parametrize("case", REFUSED_AT_A_STEP)
def test_what_cannot_be_kept_is_refused_at_the_first_step(tmp_path, case):
    """It came to light at the first save, hundreds of steps later."""
    value, key, words = REFUSED_AT_A_STEP[case]
    model = network()
    saver = CheckpointSaver(None, tmp_path, every=500)
    optimizer = Unusual(model.parameters(), value, key)
    saver.register(model=model, optimizer=optimizer)
    learn(model, optimizer, 0)
    with pytest.raises(SelectionError, match=words):
        saver.step()


def with_setting(value):
    def make(parameters):
        return torch.optim.SGD([{"params": parameters, "odd": value}], lr=0.1)

    return make


def with_state_beside(value):
    def make(parameters):
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        optimizer.state["beside"] = value
        return optimizer

    return make


def around(place):
    def make(parameters):
        return Around(parameters, place(torch.optim.AdamW(parameters)))

    return make


WIDE = torch.zeros(1 << 19)
REFUSED_AT_ONCE = {
    "LBFGS": (torch.optim.LBFGS, "its state belongs to all parameters together"),
    "an object beside": (with_state_beside(object()), ".*beside.*object"),
    "a large tensor beside": (with_state_beside(WIDE), ".*: 2,097,152 bytes of tensors"),
    "around another": (around(lambda inner: inner), "its 'inner' is an optimizer with state of"),
    "around a list": (around(lambda inner: [inner]), "its 'inner' is an optimizer"),
    "around a dict": (around(lambda inner: {"all": inner}), "its 'inner' is an optimizer"),
    "an object as a setting": (with_setting(object()), "group 0: odd.*builtins.object"),
    "a function in a setting": (with_setting([learn]), "group 0: odd.*function"),
    "a large tensor as a setting": (with_setting(WIDE), "group 0: odd.*2,097,152 byt"),
}


@pytest.mark.parametrize("case", REFUSED_AT_ONCE)
def test_what_cannot_be_kept_is_refused_when_it_is_registered(tmp_path, case):
    make, words = REFUSED_AT_ONCE[case]
    model = network()
    with pytest.raises(SelectionError, match=f"optimizer: {words}"):
        CheckpointSaver(None, tmp_path).register(
            model=model, optimizer=make(list(model.parameters()))
        )


def described(entry):
    return {"class": "SOAP", "groups": [], "state": {"weight": {"sides": entry}}}


def test_containers_with_other_tensors_on_some_ranks_are_refused():
    leaf = {"shape": [2], "dtype": "float32", "host": False}
    entry = {"tree": ["list", ["tensor", 0]], "leaves": [leaf]}
    for other in (
        {"tree": ["list"], "leaves": []},
        {"value": []},
        {**entry, "leaves": [{**leaf, "shape": [3]}]},
    ):
        with pytest.raises(
            SelectionError, match="weight: sides: the container has other tensors on rank 1"
        ):
            merge_descriptions([described(entry), described(other)])
    other = {"tree": ["list", ["tensor", 0], 1], "leaves": [leaf]}
    merged = merge_descriptions([described(entry), described(other)])
    assert merged["state"]["weight"]["sides"] == entry
    assert merged["differing"] == {"weight: sides": [1]}


def test_weights_of_a_schedule_free_optimizer_in_training_are_named(tmp_path):
    """The point of training was saved as the final model without a word."""
    model, other = network(), network()
    optimizer = ScheduleFree(model.parameters())
    with CheckpointSaver(None, tmp_path, **QUIET) as saver:
        saver.register(model=model, optimizer=optimizer)
        learn(model, optimizer, 0)
        words = (
            "ScheduleFree is in train mode: the weights are the point of training, not the average"
        )
        assert saver.save(model, tmp_path / "trained").notes[0].startswith(words)
        assert saver.save_state().notes[0].startswith(words)
        assert saver.save(other, tmp_path / "other").notes == ()
        optimizer.eval()
        assert saver.save(model, tmp_path / "averaged").notes == ()


# Groups, and what requires a gradient at the moment of the save.

SEED = chosen_seed()
DRAWN = ("sgd", "momentum", "fused", "foreach", "tensor_rate", "Adafactor", "centered")
PARTS = (0, 2, 4)  # the layers with parameters
FLIPS = st.lists(st.tuples(st.sampled_from(PARTS), st.booleans()), max_size=3)


@st.composite
def plans(draw):
    """How the layers are shared out among optimizers and their groups, and what is frozen at each
    step.
    """
    kinds = draw(st.lists(st.sampled_from(sorted(DRAWN)), min_size=1, max_size=2))
    place = {
        layer: (draw(st.integers(0, len(kinds) - 1)), draw(st.integers(0, 1))) for layer in PARTS
    }
    place[draw(st.sampled_from(PARTS))] = (0, 0)  # an optimizer without parameters is none
    decay = draw(st.lists(st.sampled_from([0.0, 0.1]), min_size=2, max_size=2))
    return (
        kinds,
        place,
        decay,
        draw(st.lists(FLIPS, max_size=4)),
        draw(FLIPS),
        draw(st.integers(0, 2)),
    )


def share_out(kinds, place, decay):
    """A model, and its optimizers by name."""
    model, optimizers = network(), {}
    for index, kind in enumerate(kinds):
        groups = []
        for number in (0, 1):
            layers = [model[layer] for layer in PARTS if place[layer] == (index, number)]
            if layers:
                parameters = [*nn.ModuleList(layers).parameters()]
                groups.append({"params": parameters, "weight_decay": decay[number]})
        if groups:
            optimizers[f"o{index}"] = KINDS[kind](groups)
    return model, optimizers


def freeze(model, flips):
    for layer, is_trained in flips:
        model[layer].requires_grad_(is_trained)


def learn_with_all(model, optimizers, number):
    torch.manual_seed(number)
    loss = model(torch.randn(5, 1, 4, 4)).square().mean()
    if loss.requires_grad:
        loss.backward()
    for optimizer in optimizers.values():
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


@seed(SEED)
@settings(max_examples=examples(25), deadline=None, suppress_health_check=list(HealthCheck))
@given(plans())
def test_any_optimizers_come_back_bit_for_bit(tmp_path_factory, plan):
    """FT_CKPT_SEED tries others."""
    kinds, place, decay, steps_of_run, at_save, later = plan
    folder = tmp_path_factory.mktemp(f"seed-{SEED}")
    model, optimizers = share_out(kinds, place, decay)
    for number, flips in enumerate(steps_of_run):
        freeze(model, flips)
        learn_with_all(model, optimizers, number)
    freeze(model, at_save)
    CheckpointSaver(None, folder).save_state(model, **optimizers)
    fresh, again = share_out(kinds, place, decay)
    for number in range(later):  # warm-up steps, or a run that is taken back
        learn_with_all(fresh, again, 50 + number)
    CheckpointSaver(None, folder, **QUIET).resume(model=fresh, **again)
    for name, optimizer in optimizers.items():
        assert same(optimizer.state_dict(), again[name].state_dict())
    for layer in PARTS:
        fresh[layer].requires_grad_(model[layer].weight.requires_grad)
    for number in (90, 91):
        assert learn_with_all(model, optimizers, number) == learn_with_all(fresh, again, number)


def trained(count=2):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number in range(count):
        learn(model, optimizer, number)
    return model, optimizer


def save_and_resume(folder, model, optimizer, fresh, again):
    CheckpointSaver(None, folder, **QUIET).save_state(model, optimizer=optimizer)
    CheckpointSaver(None, folder, **QUIET).resume("must", model=fresh, optimizer=again)


def test_groups_that_were_frozen_keep_their_own_settings(tmp_path):
    rates, decays = (1e-5, 1e-3, 1e-2), (0.0, 0.1, 0.2)

    def optimizer_of(model, **settings_of_all):
        groups = []
        for layer, rate, decay in zip(PARTS, rates, decays, strict=True):
            settings_of_group = {"lr": rate, "weight_decay": decay, **settings_of_all}
            groups.append({"params": [*model[layer].parameters()], **settings_of_group})
        return torch.optim.AdamW(groups)

    model, fresh = network(), network()
    freeze(model, [(0, False), (2, False)])
    optimizer, again = optimizer_of(model), optimizer_of(fresh, lr=7.0, weight_decay=7.0)
    learn(model, optimizer, 1)
    save_and_resume(tmp_path, model, optimizer, fresh, again)
    for live in (optimizer, again):
        assert tuple(group["lr"] for group in live.param_groups) == rates
        assert tuple(group["weight_decay"] for group in live.param_groups) == decays


@pytest.mark.parametrize("at_save", [False, True])
def test_what_requires_a_gradient_at_the_moment_does_not_matter(tmp_path, at_save):
    """A GAN's loop freezes the discriminator in half of each step; its optimizer was lost."""
    model, optimizer = trained()
    model.requires_grad_(at_save)
    fresh, again = trained(0)
    fresh.requires_grad_(not at_save)
    save_and_resume(tmp_path, model, optimizer, fresh, again)
    assert same(optimizer.state_dict(), again.state_dict())


def test_what_was_trained_and_is_frozen_now_is_part_of_an_adapters_run(tmp_path):
    """The base was trained first, and left out of every checkpoint from the moment it was
    frozen.
    """
    from peft import LoraConfig, get_peft_model

    def adapted():
        return get_peft_model(
            network(), LoraConfig(target_modules=["2"], r=2, init_lora_weights=True)
        )

    model = adapted()
    last = model.base_model.model[4].requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    learn(model, optimizer, 0)
    for place, frozen in (("base", last), ("around an evaluation", model)):
        frozen.requires_grad_(False)
        fresh = adapted()
        again = torch.optim.AdamW(fresh.parameters(), lr=0.01)
        save_and_resume(tmp_path / place, model, optimizer, fresh, again)
        assert same(model.state_dict(), fresh.state_dict())


def test_groups_in_another_order_are_matched_by_their_names(tmp_path):
    model, fresh = network(), network()
    optimizer = torch.optim.SGD(
        [{"params": [*model[i].parameters()], "lr": 0.1 + i} for i in PARTS], momentum=0.9
    )
    learn(model, optimizer, 0)
    again = torch.optim.SGD(
        [{"params": [*fresh[i].parameters()], "lr": 9.0} for i in reversed(PARTS)], momentum=0.9
    )
    save_and_resume(tmp_path, model, optimizer, fresh, again)
    assert [group["lr"] for group in again.param_groups] == [4.1, 2.1, 0.1]
    mixed = torch.optim.SGD([{"params": [*fresh[:3].parameters()]}, {"params": fresh[4].weight}])
    with pytest.raises(
        LoadError, match="parameter group 0: its 4 parameters are not one group in the checkpoint"
    ):
        CheckpointSaver(None, tmp_path, **QUIET).resume(model=fresh, optimizer=mixed)


def test_state_of_a_parameter_that_left_its_group_comes_back(tmp_path):
    model, optimizer = trained()
    fresh, again = trained(0)
    left = optimizer.param_groups[0]["params"].pop()
    again.param_groups[0]["params"].pop()
    save_and_resume(tmp_path, model, optimizer, fresh, again)
    assert same(optimizer.state[left], again.state[fresh[4].weight])
    assert len(again.state) == 5


# On ranks.

TOLD = {"enter_timeout_seconds": 60, "on_difference": "ignore"}
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs the deepspeed extra"
)


class OfShards(Small):
    """A list with a matrix of this rank's own elements."""

    def update(self, parameter, gradient, group):
        part = gradient.to_local() if is_distributed(gradient) else gradient  # type: ignore[attr-defined]
        flat = part.flatten()[:3]
        self.state[parameter]["sides"] = [torch.outer(flat, flat)]
        return gradient


def under(wrapper, optimizer, seed_of_model):
    wrappers.adam = lambda model: optimizer([p for p in model.parameters() if p.requires_grad])
    return WRAPPERS[wrapper](models.build("llama", seed_of_model))


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


def call_on_two(function, wrapper, *arguments):
    zero = (
        {"group_seconds": None, "env": {"DS_ACCELERATOR": "cpu"}}
        if wrapper.startswith("zero")
        else {}
    )
    call_on_ranks(2, function, wrapper, *arguments, timeout=280, **zero)


WRAPPED = [("preconditioned", "ddp"), ("turned", "ddp")]
for optimizer_kind in ("nested", "settings"):
    WRAPPED += [(optimizer_kind, wrapper) for wrapper in ("ddp", "fsdp1", "fsdp1_flat", "fsdp2")]
ZERO = [pytest.param("settings", wrapper, marks=needs_deepspeed) for wrapper in ("zero1", "zero3")]


@pytest.mark.sample("preconditioned-ddp", "nested-fsdp2")
@pytest.mark.parametrize(("kind", "wrapper"), [*WRAPPED, *ZERO])
def test_on_two_ranks(tmp_path, kind, wrapper):
    call_on_two(go_on_on_ranks, wrapper, tmp_path, kind)


def go_on_on_ranks(wrapper, folder, kind):
    live = under(wrapper, KINDS[kind], 0)
    with saver_of(live, folder) as saver:
        train_on_ranks(live, saver, 0, 2)
        expected = train_on_ranks(live, saver, 2, 2)
    fresh = under(wrapper, KINDS[kind], 1)
    with saver_of(fresh, folder) as saver:
        assert saver.resume("checkpoint-2").report.problems == ()
        assert train_on_ranks(fresh, saver, 2, 2) == expected
    before, after = truth(live), truth(fresh)
    assert all(torch.equal(before[name], after[name]) for name in before)


CUT = [
    "fsdp1",
    "fsdp2",
    *(pytest.param(f"zero{stage}", marks=needs_deepspeed) for stage in (1, 2, 3)),
]


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", CUT)
def test_matrices_of_shards_are_refused(tmp_path, wrapper):
    call_on_two(refuse_on_ranks, wrapper, tmp_path)


def refuse_on_ranks(wrapper, folder):
    """On all ranks, also where one of them has no elements of a parameter."""
    live = under(wrapper, OfShards, 0)
    saver = saver_of(live, folder)
    with pytest.raises(
        CheckpointError, match=r"sides: .*not cut like the parameter|sides: list|rank \d"
    ):
        train_on_ranks(live, saver, 0, 1)


@on_ranks(2, timeout=280)
def test_torchs_optimizer_that_shares_state_out_is_refused_on_all_ranks(tmp_path):
    model = network()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    with pytest.raises(
        SelectionError, match="optimizer: its 'optim' is an optimizer with state of its own"
    ):
        CheckpointSaver(None, tmp_path, **TOLD).register(model=model, optimizer=optimizer)
