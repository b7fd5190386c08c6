"""Models drawn from a grammar: all that their state dict lists is back bit for bit, or was refused
by its name.
"""

import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from compare import stored
from hypothesis import HealthCheck, given, seed, settings
from seeds import chosen_seed
from torch import nn

import ft_ckpt
from ft_ckpt import CheckpointSaver, errors
from ft_ckpt.messages import printable

SEED = chosen_seed()
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64]
DTYPES = [
    *FLOATS,
    torch.int8,
    torch.bool,
    torch.int64,
    torch.uint16,
    torch.float8_e4m3fn,
    torch.complex128,
]
TAKEN = frozenset(dir(nn.Module())) | {"state"}
SPECIAL = [
    "task:en",
    "a/b",
    "_orig_mod",
    "weights",
    "rank-0",
    "model",
    "_extra",
    "__metadata__",
    "module",
    "0",
]
names = st.one_of(
    st.sampled_from(SPECIAL),
    st.text(st.characters(exclude_characters=".", exclude_categories=["Cs"]), min_size=1),
).filter(lambda name: name not in TAKEN and len(name) < 12)
tensors = st.tuples(
    st.sampled_from(DTYPES), st.sampled_from([(), (0,), (3,), (2, 3)]), st.booleans()
)


@st.composite
def modules(draw, depth: int = 2):
    """(parameters, buffers, what it lists beside them, whether its first parameter has a second
    name, children).
    """
    own = draw(st.lists(names, unique=True, max_size=6))
    children = draw(st.integers(0, 2)) if depth else 0
    parts = [own[0::3], own[1::3], own[2::3][:children]]
    return (
        {name: draw(tensors) for name in parts[0]},
        {name: draw(tensors) for name in parts[1]},
        draw(st.sampled_from(["", "", "tensor", "tree", "own way"])),
        draw(st.booleans()),
        {name: draw(modules(depth - 1)) for name in parts[2]},
    )


class Made(nn.Module):
    """The module of a drawn plan, its values from `generator`."""

    def __init__(self, plan, generator) -> None:
        super().__init__()
        parameters, buffers, self.lists, tied, children = plan
        for name, (dtype, shape, trained) in parameters.items():
            value = values(dtype, shape, generator)
            self.register_parameter(
                name, nn.Parameter(value, requires_grad=trained and dtype in FLOATS)
            )
        for name, (dtype, shape, persistent) in buffers.items():
            self.register_buffer(name, values(dtype, shape, generator), persistent=persistent)
        for name, child in children.items():
            self.add_module(name, MAKE[child[2]](child, generator))
        if tied and parameters and not hasattr(self, "second name"):
            self.register_parameter("second name", self._parameters[next(iter(parameters))])
        self.state = values(torch.float32, (2,), generator)

    def take(self, state) -> None:
        self.state = state.clone()


class Listed(Made):
    """One that saves and loads in a way of its own."""

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}state"] = self.state.clone()

    def _load_from_state_dict(self, state, prefix, *rest) -> None:
        self.take(state.pop(f"{prefix}state", self.state))
        super()._load_from_state_dict(state, prefix, *rest)


class Extra(Made):
    """One with extra state, a tensor or a tree."""

    def get_extra_state(self):
        return (
            self.state
            if self.lists == "tensor"
            else {"amax": [self.state, None], "é": (1, b"\x00")}
        )

    def set_extra_state(self, state) -> None:
        self.take(state if self.lists == "tensor" else state["amax"][0])


MAKE = {"": Made, "own way": Listed, "tensor": Extra, "tree": Extra}


def build(plan, number: int) -> nn.Module:
    return MAKE[plan[2]](plan, torch.Generator().manual_seed(number))


def values(dtype, shape, generator):
    drawn = torch.randint(0, 100, shape, generator=generator)
    return drawn % 2 == 0 if dtype == torch.bool else drawn.to(dtype)


def bits(value):
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1)
        return str(value.dtype), tuple(value.shape), flat.view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {key: bits(one) for key, one in value.items()}
    return [bits(one) for one in value] if isinstance(value, (list, tuple)) else value


def listed(model):
    return {name: bits(value) for name, value in model.state_dict().items()}


def kept(save, model) -> bool:
    """Whether `save` went well; if not, it has named a tensor that the model lists."""
    try:
        save()
    except (errors.SelectionError, errors.IncompleteError) as error:
        said = str(error)
    else:
        return True
    names = [*model.state_dict(), "no tensors"]
    assert any(name in said or repr(name) in said or printable(name) in said for name in names), (
        said
    )
    return False


def check(plan) -> bool:
    """Whether the model was kept by a save of its weights; if so, it comes back as it was."""
    model = build(plan, 1)
    want = listed(model)
    with tempfile.TemporaryDirectory() as made:
        out = Path(made)
        is_kept = kept(lambda: CheckpointSaver().save(model, out / "out"), model)
        if is_kept:
            assert listed(ft_ckpt.load_model(out / "out", into=build(plan, 2))) == want
            assert {n: bits(t) for n, t in stored(out / "out").items()}.items() <= want.items()
        if kept(lambda: CheckpointSaver().save_state(model, out / "state"), model):
            again = build(plan, 3)
            CheckpointSaver().resume(out / "state", model=again)
            assert listed(again) == want
    return is_kept


CHECKS = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


def run(examples: int) -> None:
    print(f"FT_CKPT_SEED={SEED}")
    how = settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=CHECKS
    )
    outcomes = []

    @seed(SEED)
    @how
    @given(modules())
    def try_model(plan) -> None:
        outcomes.append(check(plan))

    try_model()
    assert any(outcomes), "no model was kept"


def test_any_model_is_kept_or_refused_by_name():
    run(10)


@pytest.mark.slow
def test_many_models_are_kept_or_refused_by_name():
    run(600)
