"""Wrong values in the JSON document of a run's state, whose digest fits: refused before anything is
overwritten.
"""

import copy
import io
import json
import random
import shutil
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from seeds import chosen_seed
from small_checkpoints import edit
from training import QUIET, prepared, train

from ft_ckpt import CheckpointSaver
from ft_ckpt.errors import CheckpointError, ConfigError

GONE = "gone"  # the value is left out
WRONG: list[Any] = [GONE, None, True, -1, 2.5, 10**30, float("nan"), "3", [], {}]
DOCUMENT = "state/training.json"
FLAGS = ("warm", "at_end", "sync")
NAMED = [
    *((("progress", "step"), value) for value in [*WRONG, 4]),
    *(
        (("progress", name), value)
        for name in ("epoch", "batch", "samples")
        for value in (GONE, True, -1, 2.5, "3")
    ),
    *((("signatures",), value) for value in ("3", None, [], {"model": 3})),
    *(
        (("requires_grad",), value)
        for value in ("3", 3, [], {}, {"frozen": [3]}, {"frozen": [], "trained": []})
    ),
    *((("fingerprint",), value) for value in (GONE, "3", None, [])),
    *(
        (("ranks", 0, "loader-0", "tree", "about"), value)
        for value in ({}, ["list"], ["list", "a"], ["list", 3, 4])  # older states lack it
    ),
    *((("items", "optimizer", "optimizer", "state"), value) for value in (GONE, None, [], {})),
    *(
        (("items", "optimizer", "optimizer", "state", "0.bias"), value)
        for value in (GONE, None, [], {})
    ),
]


class SavedRun:
    """A run that was saved in the middle, and copies of the checkpoint whose document says
    something else.
    """

    def __init__(self, folder: Any) -> None:
        run = prepared()
        with CheckpointSaver(run.accelerator, folder / "run", every=2, **QUIET) as saver:
            train(run, saver, 3)
            self.path = saver.save_state().path
        self.text = (self.path / DOCUMENT).read_text()
        self.copy = folder / "copy"
        shutil.copytree(self.path, self.copy)
        self.fresh()

    def fresh(self) -> None:
        """A run that nothing was restored into."""
        self.run, self.saver = prepared(), None
        self.before = self.state()

    def state(self) -> Any:
        """The bytes of all that a resume overwrites."""
        run, file = self.run, io.BytesIO()
        torch.save(
            [run.model.state_dict(), run.optimizer.state_dict(), run.scheduler.state_dict()], file
        )
        return file.getvalue()

    def resume(self, place: tuple[Any, ...] = (), value: Any = None, **options: Any) -> None:
        """Resume with `value` at `place` of the document."""
        document = json.loads(self.text)
        if place:
            *above, last = place
            holder = document
            for key in above:
                holder = holder[key]
            if value is GONE:
                del holder[last]
            else:
                holder[last] = copy.deepcopy(value)
        edit(self.copy, DOCUMENT, json.dumps(document))
        self.saver = CheckpointSaver(self.run.accelerator, **QUIET)
        self.saver.resume(self.copy, **options)

    def outcome(self, *change: Any) -> Any:
        """The state after the resume with that change and the losses of the training after it; None
        if refused.

        A position that does not fit the loader is refused when the loader is known.
        """
        try:
            self.resume(*change)
        except CheckpointError:
            assert self.state() == self.before, "refused, and overwritten"
            return None
        found = self.state()
        with suppress(CheckpointError):
            return found, train(self.run, self.saver)
        return None


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return SavedRun(tmp_path_factory.mktemp("saved"))


def leaves(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    if not inner:
        yield place
    for key, each in inner:
        yield from leaves(each, (*place, key))


@pytest.mark.sample(24)
@pytest.mark.parametrize(("place", "value"), NAMED, ids=lambda one: str(one)[:60])
def test_a_wrong_value_is_named(saved, place, value):
    with pytest.raises(CheckpointError) as found:
        saved.resume(place, value)
    # msgspec does not say under which name of a mapping a value is wrong.
    is_of_mapping = place[-1] == "0.bias" and value != GONE and type(value) is not dict
    field = "NaN" if value != value else "state[...]" if is_of_mapping else place[-1]
    assert field in str(found.value)
    assert saved.state() == saved.before


@pytest.mark.parametrize("allowed", [None, 0, 1, [None], [["optimizer"]], b"optimizer"], ids=repr)
def test_allowed_items_that_are_no_names(saved, allowed):
    with pytest.raises(ConfigError, match="expected names in a list, or True for any"):
        saved.resume(allow=allowed)


@pytest.mark.parametrize("allowed", [["nope"], ["weights"], [""]])
def test_an_unknown_name_of_an_item(saved, allowed):
    with pytest.raises(
        ConfigError, match=f"{allowed[0]!r}: no such item; there are .*optimizer.*scheduler"
    ):
        saved.resume(allow=allowed)
    assert saved.state() == saved.before


def finds(saved: SavedRun, changes: list[tuple[tuple[Any, ...], Any]]) -> list[str]:
    """Changes that are followed: the run goes on otherwise, or ends with another error than
    ours.
    """
    wanted, wrong = saved.outcome(), []
    saved.fresh()
    for place, value in changes:
        told = f"{'.'.join(map(str, place))} = {'gone' if value is GONE else repr(value)}"
        try:
            if saved.outcome(place, value) not in (None, wanted):
                wrong.append(f"{told}: another run")
        except Exception as error:
            wrong.append(f"{told}: {type(error).__name__}: {str(error)[:300]}")
        if saved.state() != saved.before:
            saved.fresh()
    return wrong


def changes_of(saved: SavedRun) -> list[tuple[tuple[Any, ...], Any]]:
    """Each value with each wrong one; not a flag's other value, nor settings of optimizer and
    scheduler: theirs.
    """
    places = leaves(json.loads(saved.text))
    ours = [one for one in places if one[:2] != ("items", "scheduler") and one[3:4] != ("groups",)]
    return [
        (place, value)
        for place in ours
        for value in WRONG
        if value is not True or place[-1] not in FLAGS
    ]


def test_some_values(saved):
    assert not finds(saved, random.Random(chosen_seed()).sample(changes_of(saved), 10))


@pytest.mark.slow
def test_every_value(saved):
    assert not finds(saved, changes_of(saved))
