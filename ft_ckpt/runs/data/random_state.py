"""Captures and restores the random number generators that a data loader may draw from.

They are the global generators, and the loader's own: those that its samplers and other parts hold.
"""

from collections.abc import Mapping
from typing import Any

from ft_ckpt.runs.data import rng
from ft_ckpt.runs.data.loaders import loader_parts


class RandomState:
    """The state of all generators that `loader` may draw from.

    It is the current state, or the one in `state` (from another `RandomState.state`).
    """

    def __init__(self, loader: Any, state: Mapping[str, Any] | None = None) -> None:
        self.loader = loader
        self.state = state or {"global": rng.capture_generators(), "own": generator_states(loader)}
        # the generator objects, in case the loader replaces them
        self._objects = {} if state else loader_generators(loader)

    def now(self) -> "RandomState":
        """Capture the state of the same generators now."""
        return RandomState(self.loader)

    def put_back(self) -> None:
        """Restore all generators. A captured state also restores which objects they were.

        Raises CorruptError for a state that does not fit.
        """
        for part, name, generator in self._objects.values():
            vars(part)[name] = generator
        set_generator_states(self.loader, self.state["own"])
        rng.restore_generators(self.state["global"])


def loader_generators(loader: Any) -> dict[str, tuple[Any, str, Any]]:
    """Return the loader's own generators by name, as (part, attribute, generator).

    An attribute "generator" that is None is listed too, with None as the generator.
    """
    generators = {}
    for part_name, part in loader_parts(loader).items():
        for name, value in getattr(part, "__dict__", {}).items():
            is_slot = name == "generator" and value is None
            if is_slot or isinstance(value, rng.KINDS):
                generators[f"{part_name}:{name}"] = (part, name, value)
    return generators


def generator_states(loader: Any) -> dict[str, Any]:
    """Return the state of each of `loader_generators` by name; None where there is no generator.

    A generator that several parts share is read once.
    """
    states: dict[int, Any] = {}
    by_key = {}
    for key, (_, _, generator) in loader_generators(loader).items():
        if id(generator) not in states:
            states[id(generator)] = rng.state_of(generator)
        by_key[key] = states[id(generator)]
    return by_key


def set_generator_states(loader: Any, saved: Mapping[str, Any]) -> None:
    """Restore the result of `generator_states`. A stored None removes the generator.

    Raises CorruptError for a state that does not fit.
    """
    for key, (part, name, generator) in loader_generators(loader).items():
        if key not in saved:
            continue
        state = saved[key]
        restored = None if state is None else rng.generator_in(state, generator)
        if restored is not generator:
            setattr(part, name, restored)
