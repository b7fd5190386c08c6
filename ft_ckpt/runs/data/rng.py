"""Captures and restores random number generators: the global ones and those of data loaders.

The global generators are Python's `random`, NumPy's legacy generator, torch's CPU generator and
those of accelerators. With several ranks, a process has the generator of its current device. A
single process has the generators of all its devices.

To read the state of an accelerator, a few bytes of host memory are copied (on CUDA seed and
offset). No kernel runs, and the call does not wait. A device that this process has not used yet is
left uninitialized, because it has no state beyond the seed. Nothing is pickled.
"""

import random
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from ft_ckpt.errors import CorruptError, shown
from ft_ckpt.messages import short_repr

GeneratorStates = dict[str, Any]
# the kind and object of each global generator, by the name of its state
_GLOBAL: dict[str, tuple[str, Any]] = {
    "python": ("python", random._inst),
    "numpy": ("numpy legacy", np.random.mtrand._rand),
    "torch": ("torch", torch.default_generator),
}
# words in the state of the Mersenne Twister; NumPy reads out of bounds from a larger position
_NUMPY_WORDS = 624
# classes of the generators whose state `state_of` reads
KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
# errors that generators raise for a state that does not fit
_REFUSALS = (
    AttributeError,
    IndexError,
    KeyError,
    OverflowError,
    RuntimeError,
    TypeError,
    ValueError,
)


def capture_generators() -> GeneratorStates:
    """Capture the state of all global generators, in about 5 KB per generator.

    The keys are "python", "numpy", "torch", and the type of the accelerator ("cuda") if the process
    uses one. The values are plain values, numpy arrays and CPU tensors.
    """
    state: GeneratorStates = {
        name: _current_state(generator) for name, (_, generator) in _GLOBAL.items()
    }
    for kind, indices in _device_indices().items():
        state[kind] = [torch.get_device_module(kind).get_rng_state(*index) for index in indices]
    return state


def restore_generators(state: Mapping[str, Any]) -> list[str]:
    """Set all global generators to `state`, a result of `capture_generators`.

    Returns a sentence for each problem. A generator that refuses its state keeps its own, and the
    others are restored. An accelerator that is only in `state`, or only in use in this process, is
    a problem too.
    """
    problems = []
    for name, (kind, generator) in _GLOBAL.items():
        problems += _try_put(name, partial(_put_or_keep, kind, generator), state)
    devices = _device_indices()
    for kind, indices in _device_indices(wake=True).items():
        if kind in state:
            devices[kind] = indices
    for kind, indices in devices.items():
        problems += _try_put(kind, partial(_put_devices, kind, indices), state)
    return problems + _unknown_devices(state, devices)


def _unknown_devices(state: Mapping[str, Any], devices: Collection[str]) -> list[str]:
    """Return a sentence for each type of accelerator in `state` that is not in `devices`."""
    unknown = [kind for kind in state if kind not in _GLOBAL and kind not in devices]
    return [f"{kind}: saved from a device this process has none of" for kind in unknown]


def generator_problems(state: Any) -> list[str]:
    """Return a sentence for each stored state that cannot be restored.

    The states are tried on new generators. States of accelerators are not tried.
    """
    if not isinstance(state, Mapping):
        return [f"{short_repr(state)}, expected the states of generators"]
    problems = []
    for name, (kind, _) in _GLOBAL.items():
        problems += _try_put(name, partial(_put_on_new, kind), state)
    return problems + _unknown_devices(state, _device_indices(wake=True))


def state_of(generator: Any) -> GeneratorStates | None:
    """Return the state of a generator of torch, NumPy or Python; None for any other object.

    The result has "kind" and "state", and the "device" of a torch generator.
    """
    if isinstance(generator, torch.Generator):
        return {"kind": "torch", "device": str(generator.device), "state": generator.get_state()}
    if isinstance(generator, np.random.Generator):
        return {"kind": "numpy", "state": dict(generator.bit_generator.state)}
    if isinstance(generator, np.random.RandomState):
        return {"kind": "numpy legacy", "state": generator.get_state(legacy=False)}
    if isinstance(generator, random.Random) and not isinstance(generator, random.SystemRandom):
        return {"kind": "python", "state": python_state(generator.getstate())}
    return None


def _current_state(generator: Any) -> Any:
    described = state_of(generator)
    assert described is not None, "a global generator is of a known kind"
    return described["state"]


def generator_in(state: Mapping[str, Any], generator: Any = None) -> Any:
    """Return a generator with `state`, which is a result of `state_of`.

    It is `generator` itself if this is of the same kind, else a new generator. Raises CorruptError
    for an invalid state.
    """
    try:
        kind = state["kind"]
        current = None if generator is None else state_of(generator)
        if current is None or current["kind"] != kind:
            generator = _MAKERS[kind](state)
        _put_state(kind, generator, state["state"])
    except _REFUSALS as error:
        raise CorruptError(
            f"a random number generator: the saved state does not fit: {error}"
        ) from error
    return generator


def _put_state(kind: str, generator: Any, state: Any) -> None:
    if kind == "torch":
        generator.set_state(_byte_tensor(state))
    elif kind == "python":
        generator.setstate(_python_tuple(state))
    elif kind == "numpy":
        generator.bit_generator.state = dict(state)
    else:
        generator.set_state(_numpy_state(state))


def _put_or_keep(kind: str, generator: Any, state: Any) -> None:
    """Set the generator to `state`; if that fails, set it to its current state and raise."""
    before = _current_state(generator)
    try:
        _put_state(kind, generator, state)
    except _REFUSALS:  # the generator may have set a part of the state before it checked the rest
        _put_state(kind, generator, before)
        raise


def _put_on_new(kind: str, state: Any) -> None:
    generator_in({"kind": kind, "device": "cpu", "state": state})


def _try_put(name: str, put: Callable[[Any], str | None], state: Mapping[str, Any]) -> list[str]:
    """Call `put` with the stored state `name`, and return its problem or error as a sentence."""
    if name not in state:
        return [f"{name}: not in the saved state"]
    try:
        problem = put(state[name])
    except _REFUSALS as error:
        problem = f"the saved state does not fit ({shown(error)})"
    return [f"{name}: {problem}"] if problem else []


def python_state(state: tuple[Any, ...]) -> GeneratorStates:
    """Return the result of `random.getstate` as plain values and an array."""
    version, words, gauss = state
    return {"version": version, "words": np.array(words, dtype=np.uint32), "gauss": gauss}


def plain_states(python: tuple[Any, ...], numpy: tuple[Any, ...], cpu: Any) -> GeneratorStates:
    """Convert the states that Python, NumPy and torch return, for `restore_generators`."""
    _kind, words, position, has_gauss, gauss = numpy
    legacy = {
        "bit_generator": "MT19937",
        "state": {"key": words, "pos": int(position)},
        "has_gauss": int(has_gauss),
        "gauss": float(gauss),
    }
    return {"python": python_state(python), "numpy": legacy, "torch": cpu}


def _python_tuple(state: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the argument of `random.setstate`.

    Raises CorruptError for values of other types, which `random.setstate` would convert.
    """
    words = tuple(int(word) for word in state["words"])
    gauss = state["gauss"]
    if type(state["version"]) is not int or type(gauss) not in (float, type(None)):
        raise CorruptError(f"version {state['version']!r:.40}, gauss {gauss!r:.40}")
    return state["version"], words, gauss


def _numpy_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the argument of `set_state` of NumPy's legacy generators.

    Raises CorruptError for values that `set_state` does not check.
    """
    position = state["state"]["pos"] if state["bit_generator"] == "MT19937" else 0
    kinds = type(position), type(state["has_gauss"]), type(state["gauss"])
    if kinds != (int, int, float) or not 0 <= position <= _NUMPY_WORDS:
        has_gauss, gauss = state["has_gauss"], state["gauss"]
        raise CorruptError(
            f"pos {position!r:.40}, has_gauss {has_gauss!r:.40}, gauss {gauss!r:.40}"
        )
    return dict(state)


def _put_devices(kind: str, indices: list[tuple[int, ...]], states: Any) -> str | None:
    """Set the generators of devices, and return a problem or None."""
    # A process that saw the devices of all ranks has stored a mapping by device number.
    if isinstance(states, Mapping):
        current = torch.accelerator.current_device_index()
        numbers = [str(*index or (current,)) for index in indices]
        states = [states[number] for number in numbers if number in states]
    for saved, index in zip(states, indices, strict=False):
        torch.get_device_module(kind).set_rng_state(_byte_tensor(saved), *index)
    if len(states) != len(indices):
        return (
            f"{len(states)} devices when it was saved, {len(indices)} here; the first ones "
            "were restored"
        )
    return None


def _byte_tensor(state: Any) -> torch.Tensor:
    # A copy, because generators refuse tensors that are mapped or read lazily.
    return torch.as_tensor(state, dtype=torch.uint8, device="cpu").clone()


def _device_indices(wake: bool = False) -> dict[str, list[tuple[int, ...]]]:
    """Return how to name the devices of this process in a call such as `get_rng_state(*index)`.

    For example {"cuda": [()]} is the current device, and {"cuda": [(0,), (1,)]} are two devices. A
    device that was not used yet is left out, unless `wake`: setting its state then initializes it.
    """
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return {}
    module = torch.get_device_module(device)
    if not wake and not getattr(module, "is_initialized", lambda: True)():
        return {}
    distributed = torch.distributed
    has_group = distributed.is_available() and distributed.is_initialized()
    count = torch.accelerator.device_count()
    if count > 1 and not (has_group and distributed.get_world_size() > 1):
        return {device.type: [(index,) for index in range(count)]}
    # One device is named without a number: not every kind of device takes one (mps).
    return {device.type: [()]}


# A stored state names its kind of generator. No other kinds than these are created.
_BITS = {
    kind.__name__: kind
    for kind in (np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64)
}
_MAKERS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "torch": lambda state: torch.Generator(state["device"]),
    "numpy": lambda state: np.random.Generator(_BITS[state["state"]["bit_generator"]]()),
    "numpy legacy": lambda state: np.random.RandomState(_BITS[state["state"]["bit_generator"]]()),
    "python": lambda state: random.Random(),  # noqa: S311  # not a secret
}
