"""The random number generators that a data loader may draw from: its own and the global ones."""

from collections.abc import Mapping
from typing import Any

from ft_ckpt.runs.data import rng
from ft_ckpt.runs.data.loaders import loader_parts


class RandomState:
    """The state of all generators that `loader` may draw from: now, or as stored in `state`."""

    def __init__(self, loader: Any, state: Mapping[str, Any] | None = None) -> None:
        self.loader = loader
        self.state = state or {"global": rng.capture_generators(), "own": generator_states(loader)}
        self._objects = {} if state else loader_generators(loader)

    def now(self) -> "RandomState":
        """Capture the state of the same generators now."""
        return RandomState(self.loader)

    def put_back(self) -> None:
        """Restore all generators, as the same objects.

        Raises CorruptError for a state that does not fit.
        """
        for part, name, generator in self._objects.values():
            vars(part)[name] = generator
        set_generator_states(self.loader, self.state["own"])
        rng.restore_generators(self.state["global"])


def loader_generators(loader: Any) -> dict[str, tuple[Any, str, Any]]:
    """Return the loader's own generators as (part, attribute, generator) by name.

    The generator of an empty attribute is None.
    """
    generators = {}
    for part_name, part in loader_parts(loader).items():
        for name, value in getattr(part, "__dict__", {}).items():
            is_slot = name == "generator" and value is None
            if is_slot or isinstance(value, rng.KINDS):
                generators[f"{part_name}:{name}"] = (part, name, value)
    return generators


def generator_states(loader: Any) -> dict[str, Any]:
    """Return the state of each of `loader_generators`, None for an empty attribute.

    A shared generator is read once.
    """
    states: dict[int, Any] = {}
    by_key = {}
    for key, (_, _, generator) in loader_generators(loader).items():
        if id(generator) not in states:
            states[id(generator)] = rng.state_of(generator)
        by_key[key] = states[id(generator)]
    return by_key


def set_generator_states(loader: Any, saved: Mapping[str, Any]) -> None:
    """Restore `generator_states`; attributes that were empty become None. Raises CorruptError."""
    for key, (part, name, generator) in loader_generators(loader).items():
        if key not in saved:
            continue
        state = saved[key]
        restored = None if state is None else rng.generator_in(state, generator)
        if restored is not generator:
            setattr(part, name, restored)
