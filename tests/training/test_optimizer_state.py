"""The state of optimizers, whatever is trainable at the moment of the save, and nothing of what came after it."""

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from seeds import chosen_seed, examples
from torch import nn

from ft_ckpt import CheckpointSaver
from ft_ckpt.errors import LoadError, SelectionError

SEED = chosen_seed()
QUIET = {"on_difference": "ignore"}


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def learn(model: nn.Module, optimizers: list, number: int) -> float:
    loss = model(torch.randn(5, 3, generator=torch.Generator().manual_seed(number))).square().mean()
    if loss.requires_grad:
        loss.backward()
    for one in optimizers:
        one.step()
        one.zero_grad()
    return loss.item()


def same(one, other) -> bool:
    """Whether two trees are equal bit for bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def adamw(groups, **options):
    return torch.optim.AdamW(groups, lr=0.01, **options)


MAKERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "fused": lambda groups: adamw(groups, fused=True),
    "foreach": lambda groups: adamw(groups, foreach=True, amsgrad=True),
    "tensor rate": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(0.01), foreach=False),
    "adafactor": lambda groups: torch.optim.Adafactor(groups),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, centered=True, momentum=0.5),
}
PARTS = (0, 2, 4)  # the layers
FLIPS = st.lists(st.tuples(st.sampled_from(PARTS), st.booleans()), max_size=3)


@st.composite
def plans(draw):
    """How the layers are shared out among optimizers and their groups, and what is frozen at each step."""
    optimizers = draw(st.lists(st.sampled_from(sorted(MAKERS)), min_size=1, max_size=2))
    place = {layer: (draw(st.integers(0, len(optimizers) - 1)), draw(st.integers(0, 1))) for layer in PARTS}
    place[draw(st.sampled_from(PARTS))] = (0, 0)  # an optimizer without parameters is none
    decay = draw(st.lists(st.sampled_from([0.0, 0.1]), min_size=2, max_size=2))
    return optimizers, place, decay, draw(st.lists(FLIPS, max_size=4)), draw(FLIPS), draw(st.integers(0, 2))


def made(optimizers, place, decay):
    model, found = network(), []
    for index, name in enumerate(optimizers):
        layers = {number: [layer for layer in PARTS if place[layer] == (index, number)] for number in (0, 1)}
        groups = [
            {"params": [p for layer in layers[n] for p in model[layer].parameters()], "weight_decay": decay[n]}
            for n in (0, 1)
            if layers[n]
        ]
        found += [MAKERS[name](groups)] if groups else []
    return model, found


def freeze(model, flips):
    for layer, wanted in flips:
        model[layer].requires_grad_(wanted)


@seed(SEED)
@settings(max_examples=examples(25), deadline=None, suppress_health_check=list(HealthCheck))
@given(plans())
def test_any_optimizers_come_back_bit_for_bit(tmp_path_factory, plan):
    """FT_CKPT_SEED tries others."""
    names, place, decay, steps, at_save, later = plan
    folder = tmp_path_factory.mktemp(f"seed-{SEED}")
    model, optimizers = made(names, place, decay)
    for number, flips in enumerate(steps):
        freeze(model, flips)
        learn(model, optimizers, number)
    freeze(model, at_save)
    CheckpointSaver(None, folder).save_state(model, **{f"o{i}": one for i, one in enumerate(optimizers)})
    fresh, again = made(names, place, decay)
    for number in range(later):  # warm-up steps, or a run that is taken back
        learn(fresh, again, 50 + number)
    CheckpointSaver(None, folder, **QUIET).resume(model=fresh, **{f"o{i}": one for i, one in enumerate(again)})
    assert all(same(one.state_dict(), other.state_dict()) for one, other in zip(optimizers, again, strict=True))
    for layer in PARTS:
        fresh[layer].requires_grad_(model[layer].weight.requires_grad)
    for number in (90, 91):
        assert learn(model, optimizers, number) == learn(fresh, again, number)


def trained(steps=2, **options):
    model = network()
    optimizer = adamw(model.parameters(), **options)
    for number in range(steps):
        learn(model, [optimizer], number)
    return model, optimizer


def test_going_back_leaves_nothing_of_later_steps(tmp_path):
    """Moments, step counts and gradients of what came after stayed."""
    model, optimizer = trained(0)
    saver = CheckpointSaver(None, tmp_path)
    saver.save_state(model, optimizer=optimizer)
    expected = [learn(model, [optimizer], number) for number in range(3)]
    model[0].weight.grad = torch.full_like(model[0].weight, float("nan"))
    saver.resume("must")
    assert dict(optimizer.state) == {}
    assert [p.grad for p in model.parameters()] == [None] * 6
    assert [learn(model, [optimizer], number) for number in range(3)] == expected


def test_groups_that_were_frozen_keep_their_own_settings(tmp_path):
    def groups(model):
        rates = zip((0, 2, 4), (1e-5, 1e-3, 1e-2), (0.0, 0.1, 0.2), strict=True)
        return [{"params": [*model[i].parameters()], "lr": lr, "weight_decay": decay} for i, lr, decay in rates]

    model = network()
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    optimizer = torch.optim.AdamW(groups(model))
    learn(model, [optimizer], 1)
    CheckpointSaver(None, tmp_path).save_state(model, optimizer=optimizer)
    fresh = network()
    again = torch.optim.AdamW([{**group, "lr": 7.0, "weight_decay": 7.0} for group in groups(fresh)])
    CheckpointSaver(None, tmp_path, **QUIET).resume(model=fresh, optimizer=again)
    settings_of = [[(g["lr"], g["weight_decay"]) for g in one.param_groups] for one in (optimizer, again)]
    assert settings_of[0] == settings_of[1] == [(1e-5, 0.0), (1e-3, 0.1), (1e-2, 0.2)]


@pytest.mark.parametrize("at_save", [False, True])
def test_what_requires_a_gradient_at_the_moment_does_not_matter(tmp_path, at_save):
    """A GAN's loop freezes the discriminator in half of each step; its optimizer was lost."""
    model, optimizer = trained()
    model.requires_grad_(at_save)
    CheckpointSaver(None, tmp_path).save_state(model, optimizer=optimizer)
    fresh, again = trained(0)
    fresh.requires_grad_(not at_save)
    CheckpointSaver(None, tmp_path, **QUIET).resume(model=fresh, optimizer=again)
    assert same(optimizer.state_dict(), again.state_dict())


def test_what_was_trained_and_is_frozen_now_is_part_of_an_adapters_run(tmp_path):
    """The base was trained first, and left out of every checkpoint from the moment it was frozen."""
    from peft import LoraConfig, get_peft_model

    def made():
        return get_peft_model(network(), LoraConfig(target_modules=["0"], r=2, init_lora_weights=True))

    model = made()
    model.base_model.model[4].requires_grad_(True)
    optimizer = adamw(model.parameters())
    learn(model, [optimizer], 0)
    model.base_model.model[4].requires_grad_(False)
    CheckpointSaver(None, tmp_path).save_state(model, optimizer=optimizer)
    fresh = made()
    CheckpointSaver(None, tmp_path, **QUIET).resume(model=fresh, optimizer=adamw(fresh.parameters()))
    assert same(model.state_dict(), fresh.state_dict())
    model.requires_grad_(False)  # as around an evaluation
    saver = CheckpointSaver(None, tmp_path / "frozen")
    saver.save_state(model, optimizer=optimizer)
    fresh = made()
    CheckpointSaver(None, tmp_path / "frozen", **QUIET).resume(model=fresh, optimizer=adamw(fresh.parameters()))
    assert same(model.state_dict(), fresh.state_dict())


def test_groups_in_another_order_are_found_by_their_names(tmp_path):
    model = network()
    optimizer = torch.optim.SGD([{"params": [*model[i].parameters()], "lr": 0.1 + i} for i in PARTS], momentum=0.9)
    learn(model, [optimizer], 0)
    CheckpointSaver(None, tmp_path).save_state(model, optimizer=optimizer)
    fresh = network()
    again = torch.optim.SGD([{"params": [*fresh[i].parameters()], "lr": 9.0} for i in reversed(PARTS)], momentum=0.9)
    CheckpointSaver(None, tmp_path, **QUIET).resume(model=fresh, optimizer=again)
    assert [group["lr"] for group in again.param_groups] == [4.1, 2.1, 0.1]
    mixed = torch.optim.SGD([{"params": [*fresh[0].parameters(), *fresh[2].parameters()]}, {"params": fresh[4].weight}])
    mixed.add_param_group({"params": fresh[4].bias})
    with pytest.raises(LoadError, match="parameter group 0: its 4 parameters are not one group in the checkpoint"):
        CheckpointSaver(None, tmp_path, **QUIET).resume(model=fresh, optimizer=mixed)


def test_state_of_a_parameter_that_left_its_group_comes_back(tmp_path):
    model, optimizer = trained()
    left = optimizer.param_groups[0]["params"].pop()
    CheckpointSaver(None, tmp_path).save_state(model, optimizer=optimizer)
    fresh, again = trained(0)
    again.param_groups[0]["params"].pop()
    CheckpointSaver(None, tmp_path, **QUIET).resume(model=fresh, optimizer=again)
    assert same(optimizer.state[left], again.state[fresh[4].bias])
    assert len(again.state) == 6


BESIDE = {"calls": 7, "scale": {"now": 0.5, "seen": [1, 2], "mean": torch.arange(3.0)}, ("a", 1): None}


def test_state_under_keys_that_are_no_parameters_is_kept(tmp_path):
    model, optimizer = trained()
    optimizer.state.update(copy.deepcopy(BESIDE))
    saver = CheckpointSaver(None, tmp_path, background=True)
    saver.save_state(model, optimizer=optimizer)
    saver.close()
    fresh, again = trained(1)
    again.state["stale"] = 1
    CheckpointSaver(None, tmp_path, **QUIET).resume(model=fresh, optimizer=again)
    assert same(optimizer.state_dict(), again.state_dict())


class Holder(torch.optim.SGD):
    """An optimizer with state beside its parameters that is no tree of values."""

    def __init__(self, parameters, beside):
        super().__init__(parameters, lr=0.1)
        self.state["beside"] = beside


class Around(torch.optim.Optimizer):
    """An optimizer around others: what it steps is not what its `state` says."""

    def __init__(self, parameters, inner):
        self.inner = inner
        super().__init__(parameters, {})

    def step(self, closure=None):
        self.inner.step(closure)

    def state_dict(self):
        return self.inner.state_dict()


class AroundOpenly(Around):
    """The same, whose state is that of the one inside."""

    state = property(lambda self: self.inner.state, lambda self, value: None)


def test_an_optimizer_around_another_that_shares_its_state(tmp_path):
    model, fresh = network(), network()
    optimizer = AroundOpenly(model.parameters(), torch.optim.AdamW(model.parameters()))
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    CheckpointSaver(None, tmp_path, **QUIET).save_state(model, optimizer=optimizer)
    again = AroundOpenly(fresh.parameters(), torch.optim.AdamW(fresh.parameters()))
    CheckpointSaver(None, tmp_path, **QUIET).resume("must", model=fresh, optimizer=again)
    assert same(optimizer.inner.state_dict()["state"], again.inner.state_dict()["state"])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (torch.optim.LBFGS, "optimizer: its state belongs to all parameters together"),
        (lambda parameters: Holder(parameters, object()), "optimizer: .*beside.*object"),
        (lambda parameters: Holder(parameters, torch.zeros(1 << 19)), "optimizer: .*: 2,097,152 bytes of tensors"),
        (
            lambda each: Around(each, torch.optim.AdamW(each)),
            "optimizer: its 'inner' is an optimizer with state of",
        ),
        (lambda each: Around(each, [torch.optim.AdamW(each)]), "optimizer: its 'inner' is an optimizer"),
        (lambda each: Around(each, {"all": torch.optim.AdamW(each)}), "optimizer: its 'inner' is an optimizer"),
    ],
)
def test_what_cannot_be_kept_is_refused_when_it_is_registered(tmp_path, make, words):
    model = network()
    with pytest.raises(SelectionError, match=words):
        CheckpointSaver(None, tmp_path).register(model=model, optimizer=make(list(model.parameters())))
