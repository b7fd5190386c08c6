"""The state of every global generator, taken and put back."""

import random

import numpy as np
import pytest
import torch

import ft_ckpt
from ft_ckpt.runs.data import rng


def draws() -> list[float]:
    """A few numbers of every generator, with Gaussian ones, of which Python and NumPy keep every
    second for later.
    """
    mine = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()]
    return [
        *map(float, mine),
        float(torch.rand(())),
        float(torch.nn.functional.dropout(torch.ones(64)).sum()),
    ]


def scramble(seed: int = 99) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    draws()


def test_restored_generators_go_on_as_they_would_have() -> None:
    scramble(1)
    state = rng.capture_generators()
    expected = [draws() for _ in range(3)]
    scramble(2)
    assert rng.restore_generators(state) == []
    assert [draws() for _ in range(3)] == expected


@pytest.mark.parametrize("suffix", ["h5", "safetensors"])
def test_state_goes_through_a_file(tmp_path, suffix) -> None:
    scramble(1)
    ft_ckpt.save(rng.capture_generators(), tmp_path / f"rng.{suffix}")
    expected = draws()
    scramble(2)
    assert rng.restore_generators(ft_ckpt.load(tmp_path / f"rng.{suffix}")) == []
    assert draws() == expected


def test_another_numpy_generator_is_kept() -> None:
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(5))
        state = rng.capture_generators()
        expected = np.random.rand(5)
        np.random.rand(3)
        assert rng.restore_generators(state) == []
        assert (np.random.rand(5) == expected).all()
    finally:
        np.random.set_bit_generator(before)


@pytest.mark.parametrize("name", ["python", "numpy", "torch"])
@pytest.mark.parametrize("damage", ["missing", "short", "other kind"])
def test_what_cannot_be_restored_is_named_and_the_rest_is(name, damage) -> None:
    """A missing or corrupt RNG state passed in silence."""
    scramble(1)
    state = rng.capture_generators()
    expected = draws()
    broken = dict(state)
    if damage == "missing":
        del broken[name]
    elif damage == "other kind":
        broken[name] = "not a state"
    else:
        part = {"python": "words", "numpy": "state"}.get(name)
        short = {"words": state["python"]["words"][:7], "state": {"pos": 3}}
        broken[name] = {**state[name], part: short[part]} if part else state[name][:100]
    scramble(2)
    untouched = dict(zip(("python", "numpy", "torch"), chunks(peek()), strict=True))[name]
    problems = rng.restore_generators(broken)
    assert len(problems) == 1
    assert problems[0].startswith(f"{name}: ")
    for other, found, wanted in zip(
        ("python", "numpy", "torch"), chunks(draws()), chunks(expected), strict=True
    ):
        assert found == (untouched if other == name else wanted)


def chunks(numbers: list[float]) -> list[list[float]]:
    return [numbers[0:2], numbers[2:4], numbers[4:6]]


def peek() -> list[float]:
    state = rng.capture_generators()
    numbers = draws()
    rng.restore_generators(state)
    return numbers


def test_an_accelerator_that_is_not_here_is_named() -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has one")
    assert rng.restore_generators(
        {**rng.capture_generators(), "cuda": [torch.zeros(16, dtype=torch.uint8)]}
    ) == ["cuda: saved from a device this process has none of"]


@pytest.mark.accelerator
def test_an_accelerator_goes_on_as_it_would_have() -> None:
    device = torch.accelerator.current_accelerator()
    torch.manual_seed(3)
    torch.ones(1, device=device)  # one that nothing has touched has no state
    state = rng.capture_generators()
    expected = torch.rand(5, device=device)
    torch.manual_seed(4)
    assert rng.restore_generators(state) == []
    assert torch.equal(torch.rand(5, device=device), expected)


@pytest.mark.parametrize(
    ("generator", "draw"),
    [
        (
            torch.Generator().manual_seed(1),
            lambda generator: torch.rand(3, generator=generator).tolist(),
        ),
        (np.random.default_rng(1), lambda generator: generator.normal(size=3).tolist()),
        (
            np.random.Generator(np.random.Philox(1)),
            lambda generator: generator.normal(size=3).tolist(),
        ),
        (np.random.RandomState(1), lambda generator: generator.randn(3).tolist()),
        (random.Random(1), lambda generator: [generator.gauss(0, 1) for _ in range(3)]),
    ],
    ids=["torch", "numpy", "philox", "numpy legacy", "python"],
)
def test_a_single_generator_goes_on_and_a_new_one_is_made_where_there_is_none(
    tmp_path, generator, draw
) -> None:
    draw(generator)
    ft_ckpt.save(rng.state_of(generator), tmp_path / "generator.h5")
    state = ft_ckpt.load(tmp_path / "generator.h5")
    expected = draw(generator)
    assert draw(rng.generator_in(state)) == expected
    assert rng.generator_in(state, generator) is generator
    assert draw(generator) == expected


def test_what_is_no_generator_and_no_state() -> None:
    assert rng.state_of("generator") is None
    assert rng.state_of(random.SystemRandom()) is None
    with pytest.raises(ft_ckpt.errors.CorruptError, match="does not fit"):
        rng.generator_in({"kind": "numpy", "state": {"bit_generator": "seed"}})
