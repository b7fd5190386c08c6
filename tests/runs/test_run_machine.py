"""A run against a dictionary: Hypothesis trains, saves, crashes, resumes, prunes, pins, damages,
and compares.

The dictionary says which checkpoints the run's folder must hold, and of which step, save and run.
What each of them must contain is the state of a run without ft_ckpt after that step
(tests/helpers/reference_run.py). A failure prints the steps that led there as a program.
"""

import errno
import json
import math
import multiprocessing
import os
import random
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, redirect_stdout, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from io import StringIO
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from faults import Disk, World
from hypothesis import seed, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from reference_run import Moment, Program, Reference, differences, same, untouched_draws
from seeds import chosen_seed, examples, machine_settings
from small_checkpoints import contents

import ft_ckpt
from ft_ckpt import CheckpointSaver, Keep
from ft_ckpt.cli import run_command
from ft_ckpt.errors import (
    CheckpointError,
    CorruptError,
    LeaseTakenError,
    NotACheckpointError,
    TargetError,
)
from ft_ckpt.runs.folder import lease as run_lease
from ft_ckpt.storage import local_disk

FORK = multiprocessing.get_context("fork")
MAX_LAUNCHES = 2  # of several ranks, in each example
MOVES = ("move", "exchange_folders")  # the calls that put a save in place
APPENDED = -1  # the place of a byte that a file did not have
FINAL = "final"  # weights that are saved beside the checkpoints of the run
KEEPS = {
    "all": None,
    "last": Keep(last=2),
    "best": Keep(last=1, best=("loss", "min")),
    "states": Keep(last=3, state=Keep(last=1)),
    "multiples": Keep(every_steps=3),
}
RULES_OF_PRUNE = {
    "--last 1": Keep(last=1),
    "--last 2": Keep(last=2),
    "--best loss:max": Keep(best=("loss", "max")),
    "--last 3 --state-last 2": Keep(last=3, state=Keep(last=2)),
}


@dataclass(frozen=True)
class Saved:
    """A checkpoint that must be there."""

    step: int
    salt: int  # of the run without ft_ckpt that it must equal
    number: int  # of the save that made it, from 1
    run: int
    loss: float
    ancestors: frozenset[int] = frozenset()  # runs that this one has branched off
    has_state: bool = True
    is_pinned: bool = False
    damage: str = ""  # the file with a changed byte
    # a killed sweep was taking its state away: a pin brings it back if it is still whole
    may_return: bool = False

    @property
    def files(self) -> list[str]:
        """The files that its manifest lists."""
        state = ["state/training.json", "state/training.safetensors"]
        return ["model.safetensors", *(state if self.has_state else [])]

    @property
    def is_damaged(self) -> bool:
        return self.damage in self.files

    @property
    def metrics(self) -> dict[str, float]:
        """What its save is given."""
        return {"loss": self.loss, "number": self.number}


Saves = dict[str, Saved]


# What must be there, said again in other words than those of ft_ckpt


def in_order(saves: Saves) -> list[str]:
    """Oldest first: runs by their newest save, checkpoints of a run by step."""
    newest = {
        saved.run: max(other.number for other in saves.values() if other.run == saved.run)
        for saved in saves.values()
    }
    return sorted(
        saves, key=lambda name: (newest[saves[name].run], saves[name].step, saves[name].number)
    )


def best_of(saves: Saves) -> str | None:
    """The best of the newest run, of equal ones the oldest."""
    order = in_order(saves)
    newest = [name for name in order if saves[name].run == saves[order[-1]].run]
    ranked = [
        name for name in newest if not saves[name].is_damaged and not math.isnan(saves[name].loss)
    ]
    return min(ranked, key=lambda name: saves[name].loss, default=None)


def after_pruning(saves: Saves, keep: Keep, run: int | None, guarded: Collection[str]) -> Saves:
    """What rules leave of one run, or of each."""
    left = dict(saves)
    runs = {saved.run for saved in saves.values()} if run is None else {run}
    for judged in runs:
        names = [name for name in in_order(saves) if saves[name].run == judged and name != FINAL]
        whole = [name for name in names if not saves[name].is_damaged]
        with_state = [name for name in whole if saves[name].has_state]
        firm = {*guarded, *whole[-1:], *with_state[-1:]} if whole else set(names)
        chosen = selected(saves, names, keep) | selected(saves, whole, keep)
        stateful = [name for name in names if saves[name].has_state]
        for name in set(names) - firm - chosen:
            del left[name]
        if keep.state is not None:
            of_state = selected(saves, stateful, keep.state) | selected(
                saves, with_state, keep.state
            )
            for name in set(stateful) - firm - of_state:
                if name in left:
                    left[name] = replace(left[name], has_state=False)
    return left


def selected(saves: Saves, names: list[str], keep: Keep) -> set[str]:
    """The checkpoints that a rule names, or all if there is no rule, or none of them has the
    metric.
    """
    if (keep.last, keep.every_steps, keep.best) == (None, None, None):
        return set(names)
    measured = [name for name in names if not math.isnan(saves[name].loss)]
    chosen = set(names[-keep.last :]) if keep.last else set()
    if keep.every_steps:
        chosen |= {name for name in names if saves[name].step % keep.every_steps == 0}
    if keep.best:
        if not [name for name in measured if not saves[name].is_damaged]:
            return set(names)
        sign = 1 if keep.best[1] == "min" else -1
        chosen.add(min(measured, key=lambda name: sign * saves[name].loss))
    return chosen


# Processes of the run


class Life:
    """A process that trains in the folder of the run: this one, or a rank of others."""

    def __init__(
        self, folder: Path | None, keep: Keep | None = None, rank: int = 0, ranks: int = 1
    ) -> None:
        torch.manual_seed(77)
        random.seed(77)
        np.random.seed(77)
        self.program = Program(rank, ranks)
        self.saver = CheckpointSaver(None, folder, keep=keep, on_difference="ignore")
        self.saver.register(**self.program.objects)
        self.samples: Iterator[list[int]] = iter(())

    def resume(self, mode: str, salt: int) -> str | None:
        """The name of the checkpoint that it was resumed from; None after a fresh start, with that
        salt.
        """
        progress = self.saver.resume(mode)
        if progress.resumed_from is None:
            self.program.begin(salt)
        self.samples = self.program.train(self.saver)
        return None if progress.resumed_from is None else Path(str(progress.resumed_from)).name

    def moment(self) -> Moment:
        """The present state."""
        progress = self.saver.progress
        return self.program.moment(progress.step, progress.epoch, progress.batch)

    def check(self, reference: Reference, step: int, number: int | None) -> None:
        """Compare the present state with that of a run without ft_ckpt, and with the save that it
        was resumed from.
        """
        has_draws = self.program.rank == 0
        assert differences(self.moment(), reference.at(step), with_draws=has_draws) == []
        labels = (self.program.label.number, int(self.program.network.label))
        assert number is None or labels == (number, number)

    def train(self, reference: Reference, step: int, count: int) -> None:
        """Make steps, with exactly the samples that are next."""
        seen = list(islice(self.samples, count))
        assert seen == [reference.samples_of(step + passed) for passed in range(1, count + 1)]
        self.check(reference, step + count, None)


class Child:
    """A forked process that does something and tells how it ended."""

    def __init__(self, action: Callable[[Connection], object]) -> None:
        self.connection, other = FORK.Pipe()
        self.process = FORK.Process(target=_tell_end, args=(other, action))
        self.process.start()
        other.close()

    def told(self) -> str:
        """What it says next."""
        return str(self.connection.recv())

    def end(self) -> None:
        """Wait for its end, which must be a good one."""
        said = self.told()
        self.process.join()
        self.connection.close()
        assert said == "done", said

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def _tell_end(connection: Connection, action: Callable[[Connection], object]) -> None:
    warnings.simplefilter("ignore")
    try:
        action(connection)
        connection.send("done")
    except BaseException as error:
        connection.send(f"{type(error).__name__}: {error}")


class Gate:
    """The object `label` of a run that stops its resume half way, with the checkpoint open."""

    def __init__(self, connection: Connection) -> None:
        self.connection, self.number = connection, 0

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]
        self.connection.send("open")
        self.connection.recv()


def read_slowly(path: Path, saved: Saved, moment: Moment, connection: Connection) -> None:
    """Resume from a checkpoint, with a pause while it is open."""
    program = Program()
    gate = Gate(connection)
    with CheckpointSaver(on_difference="ignore") as saver:
        saver.register(**{**program.objects, "label": gate})
        progress = saver.resume(path)
        found = program.moment(progress.step, progress.epoch, progress.batch)
    assert differences(found, moment) == []
    assert (gate.number, int(program.network.label)) == (saved.number, saved.number)


def join_ranks(store: Path, rank: int, ranks: int) -> None:
    """Make this process one of several ranks."""
    names = {
        "RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_RANK": rank,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 1,
    }
    os.environ |= {name: str(value) for name, value in names.items()}
    files = dist.FileStore(str(store), ranks)
    dist.init_process_group(
        "gloo", store=files, rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )


def refuse_exchange(*_: Path) -> None:
    """As many network disks do."""
    raise OSError(errno.EINVAL, "Invalid argument")


# The machine


def named(choose: Callable[["Run"], Collection[str]]) -> Any:
    """A strategy: one of the names that the machine has at this moment."""
    return st.runner().flatmap(lambda machine: st.sampled_from(sorted(choose(machine))))


class Run(RuleBasedStateMachine):
    """The folder of a run, and what must be in it."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.folder, self.outside = root / "run", root / "outside"
        self.root = root
        self.saves: Saves = {}
        self.references: dict[int, Reference] = {}
        self.readers: dict[str, tuple[Any, dict[str, torch.Tensor], Saved]] = {}
        self.slow_readers: dict[str, Child] = {}
        self.checked: dict[str, tuple[Saved, str]] = {}
        # the state of the folder and of the dictionary that were compared last
        self.compared: tuple[dict[str, tuple[int, ...]], Saves] | None = None
        self.notes: set[str] = set()  # checkpoints in whose folder somebody else has put a file
        self.number = self.runs = self.launches = 0
        self.life: Life | None = None
        self.is_used = False  # the present process has made a step
        self.step = self.salt = self.run = 0  # of the present process
        self.ancestors: frozenset[int] = frozenset()
        self.origin: str | None = None
        self.keep: Keep | None = None
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(local_disk, "fsync", lambda handle: None)  # no power is cut here

    @initialize(keep=st.sampled_from(sorted(KEEPS)), saves=st.integers(1, 3), ends=st.booleans())
    def begin(self, keep: str, saves: int, ends: bool) -> None:
        """A folder with files of others, and a process that has saved a few times."""
        self.keep = KEEPS[keep]
        self.folder.mkdir()
        (self.folder / "checkpoint-of-mine").mkdir()
        (self.folder / "checkpoint-of-mine" / "notes.txt").write_text("mine")
        (self.folder / "notes.txt").write_text("mine")
        (self.outside / "checkpoint-99").mkdir(parents=True)
        (self.outside / "checkpoint-99" / "victim.txt").write_text("mine")
        (self.folder / "linked").symlink_to(self.outside)
        self.start("auto", 0)
        for number in range(saves):
            self.save(2, float(number % 2), background=False)
        if ends:
            self.end()

    # Training

    @precondition(lambda self: self.life is None)
    @rule(
        mode=st.one_of(
            st.just("auto"), st.just("auto"), st.sampled_from(["never", "must", "oldest"])
        ),
        count=st.integers(0, 3),
    )
    def start(self, mode: str, count: int) -> None:
        """A process begins, from the newest checkpoint, from the oldest, or afresh, and makes
        steps.
        """
        chosen = self.chosen_by(mode)
        argument = self.argument_of(mode)
        life = Life(self.folder, self.keep)
        if isinstance(chosen, type):
            with pytest.raises(chosen):
                life.resume(argument, 0)
            life.saver.close()
            return
        self.life = life
        self.note_start(argument, chosen)
        assert life.resume(argument, self.salt) == chosen
        life.check(self.reference, self.step, None if chosen is None else self.saves[chosen].number)
        self.is_used = False
        self.train(count)

    @precondition(lambda self: self.life is not None)
    @rule(count=st.integers(1, 5))
    def train(self, count: int) -> None:
        assert self.life is not None
        self.life.train(self.reference, self.step, count)
        self.step += count
        self.is_used = self.is_used or count > 0

    @precondition(lambda self: self.life is not None)
    @rule(
        count=st.integers(0, 3),
        loss=st.sampled_from([0.5, 1.0, 2.0, math.nan]),
        background=st.booleans(),
    )
    def save(self, count: int, loss: float, background: bool) -> None:
        """After some steps; with a save in the background, training goes on before it ends."""
        assert self.life is not None
        saver = self.life.saver
        self.train(count)
        saved = self.marked(loss)
        if self.is_refused():
            with pytest.raises(TargetError, match="another run"):
                saver.save_state(metrics=saved.metrics)
            return
        saver.save_state(metrics=saved.metrics, background=background)
        _, self.saves = self.outcomes_of(saved)[-1]
        if background:
            self.train(1)
            saver.wait()

    @precondition(lambda self: self.life is not None and self.step > 0)
    @rule()
    def save_weights(self) -> None:
        """To one name, which the next such save overwrites."""
        assert self.life is not None
        saved = replace(self.marked(1.0), has_state=False)
        self.life.saver.save(self.life.program.network, self.folder / FINAL, metrics=saved.metrics)
        pinned = FINAL in self.saves and self.saves[FINAL].is_pinned
        self.saves[FINAL] = replace(saved, is_pinned=pinned)

    @precondition(lambda self: self.life is not None and not self.is_refused())
    @rule(call=st.integers(1, 40), fault=st.sampled_from(["EIO", "Ctrl-C"]))
    def save_interrupted(self, call: int, fault: str) -> None:
        """A call to the disk fails, or Ctrl-C comes at it; the process goes on."""
        assert self.life is not None
        saved = self.marked(1.5)
        save = partial(self.life.saver.save_state, metrics=saved.metrics)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            World(Disk(fault), fault, call).run(save)
        self.adopt(self.outcomes_of(saved))

    @precondition(lambda self: self.life is not None and self.is_used)
    @rule()
    def end(self) -> None:
        """The process ends; what it has not saved is lost."""
        assert self.life is not None
        self.life.saver.close()
        self.life = None

    @precondition(lambda self: self.life is not None)
    @rule()
    def second_process(self) -> None:
        """It is refused as long as the first one lives."""

        def begin(_: Connection) -> None:
            with pytest.raises(LeaseTakenError):
                Life(self.folder).resume("auto", 0)

        Child(begin).end()

    @precondition(lambda self: self.life is not None and not self.is_refused())
    @rule()
    def wake_up_too_late(self) -> None:
        """The process was stopped for longer than its lease lives, and another one has trained here
        since: it commits nothing.
        """
        assert self.life is not None
        lease = self.folder / ".ft_ckpt-run"
        lease.write_text(json.dumps({"token": "another", "host": "another", "pid": 1}))
        later = run_lease.steady_seconds() + 100
        saved = self.marked(1.0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run_lease, "steady_seconds", lambda: later)
            with pytest.raises(LeaseTakenError, match="taken over"):
                self.life.saver.save_state(metrics=saved.metrics)
        self.life.saver.close()
        self.life = None
        lease.unlink()

    # Crashes and ranks

    @precondition(lambda self: self.life is None and not isinstance(self.chosen_by("auto"), type))
    @rule(count=st.integers(1, 4), call=st.integers(1, 30))
    def crash(self, count: int, call: int) -> None:
        """A process resumes, trains and saves, and is killed at a call to the disk."""
        self.save_killed(count, World(Disk("killed"), "killed", call))

    @precondition(lambda self: isinstance(self.chosen_by("auto"), str))
    @rule(
        moves=st.lists(st.integers(2, 14), min_size=3, max_size=3), recovery_move=st.integers(1, 4)
    )
    def crash_in_overwrites(self, moves: list[int], recovery_move: int) -> None:
        """Processes are killed while they put a save in place of the one that they were resumed
        from, file by file, and so is the next one while it clears up.
        """
        if self.life is not None:
            self.end()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(local_disk, "exchange_folders", refuse_exchange)
            for move in moves:
                name = self.chosen_by("auto")
                assert isinstance(name, str)
                self.put_notes(name)
                self.save_killed(0, World(Disk("killed", MOVES), "killed", move), recovery_move)

    def save_killed(self, count: int, world: World, recovery_move: int = 0) -> None:
        chosen = self.resumed(count)
        if self.is_refused():
            return
        saved = self.next_number(1.0)

        def live() -> None:
            warnings.simplefilter("ignore")
            life = Life(self.folder, self.keep)
            assert life.resume("auto", self.salt) == chosen
            life.train(self.reference, self.step - count, count)
            life.program.mark(saved.number)
            life.saver.save_state(metrics=saved.metrics)

        world.run(live)
        if world.is_met and recovery_move:
            self.committed_are_whole()
            World(Disk("killed", MOVES), "killed", recovery_move).run(self.clear_up)
            self.committed_are_whole()
            self.clear_up()
        self.adopt(self.outcomes_of(saved)[0 if world.is_met else -1 :])

    @precondition(lambda self: self.life is None and not isinstance(self.chosen_by("auto"), type))
    @precondition(lambda self: self.launches < MAX_LAUNCHES)
    @rule(
        ranks=st.sampled_from([2, 3]),
        count=st.integers(1, 3),
        call=st.one_of(st.just(0), st.integers(1, 60)),
    )
    def train_on_ranks(self, ranks: int, count: int, call: int) -> None:
        """The run goes on on several ranks, which save; with a `call` rank 0 is killed there, and
        so are the others.
        """
        chosen = self.resumed(count)
        if self.is_refused():
            return
        saved = self.next_number(1.0)
        first = self.saves[chosen].number if chosen is not None else None
        self.launches += 1
        store = self.root / f"store-{self.launches}"

        def live(rank: int, _: Connection | None = None) -> None:
            join_ranks(store, rank, ranks)
            life = Life(self.folder, self.keep, rank, ranks)
            assert life.resume("auto", self.salt) == chosen
            life.check(self.reference, self.step - count, first)
            life.train(self.reference, self.step - count, count)
            life.program.mark(saved.number)
            life.saver.save_state(metrics=saved.metrics)
            life.saver.close()

        def lead(connection: Connection) -> None:
            world = World(Disk("killed"), "killed", call)
            world.run(live, 0)
            connection.send("killed" if world.is_met else "alive")

        children = [Child(lead), *(Child(partial(live, rank)) for rank in range(1, ranks))]
        ended = children[0].told()
        died = ended == "killed"
        assert died or ended == "alive", ended
        children[0].end()
        for child in children[1:]:
            if died:
                child.kill()
            else:
                child.end()
        self.adopt(self.outcomes_of(saved)[0 if died else -1 :])

    def clear_up(self) -> None:
        """What a process does at its begin for the killed one before it."""
        life = Life(self.folder, self.keep)
        with suppress(CorruptError), closing(life.saver):
            life.resume("auto", 0)

    def resumed(self, count: int) -> str | None:
        """Another process resumes and makes some steps; the name of the checkpoint that it begins
        from.
        """
        chosen = self.chosen_by("auto")
        assert not isinstance(chosen, type)
        self.note_start("auto", chosen)
        self.step += count
        return chosen

    # Retention

    @precondition(lambda self: bool(self.saves))
    @rule(rules=st.sampled_from(sorted(RULES_OF_PRUNE)), is_newest_damaged=st.booleans())
    def prune(self, rules: str, is_newest_damaged: bool = False) -> None:
        if is_newest_damaged and in_order(self.saves)[-1] in self.unread():
            self.damage_the_newest(0, APPENDED)
        if self.lacks_metric(rules):
            return
        left = self.left_by(rules)
        printed = command("prune", str(self.folder), "--run", "all", *rules.split(), "--json")
        report = json.loads(printed)
        # and what a killed sweep had begun to drop
        dropped = {Path(path).name for path in report["dropped"]}
        assert self.saves.keys() - left.keys() <= dropped
        assert not dropped & left.keys()
        self.saves = left

    @precondition(lambda self: bool(self.saves))
    @rule(
        rules=st.sampled_from(sorted(RULES_OF_PRUNE)),
        call=st.integers(1, 40),
        fault=st.sampled_from(["killed", "EIO", "Ctrl-C"]),
    )
    def prune_interrupted(self, rules: str, call: int, fault: str) -> None:
        if self.lacks_metric(rules):
            return
        left = self.left_by(rules)
        World(Disk(fault), fault, call).run(
            command, "prune", str(self.folder), "--run", "all", *rules.split()
        )
        self.adopt([(self.saves, left)])

    @precondition(lambda self: bool(self.saves))
    @rule(name=named(lambda self: self.saves))
    def pin(self, name: str) -> None:
        command("pin", str(self.folder / name))
        self.saves[name] = replace(self.saves[name], is_pinned=True)

    @precondition(lambda self: bool(self.pinned()))
    @rule(name=named(lambda self: self.pinned()))
    def unpin(self, name: str) -> None:
        command("unpin", str(self.folder / name))
        self.saves[name] = replace(self.saves[name], is_pinned=False)

    @precondition(lambda self: bool(self.saves))
    @rule(name=named(lambda self: self.saves))
    def put_notes(self, name: str) -> None:
        """Somebody keeps a file of their own in the folder of a checkpoint."""
        (self.folder / name / "notes.txt").write_text("mine")
        self.notes.add(name)

    # Readers and damage

    @precondition(lambda self: bool(self.whole()))
    @rule(name=named(lambda self: self.whole()))
    def open_tensors(self, name: str) -> None:
        """Tensors that are mapped, and stay what they are."""
        saved = self.saves[name]
        with untouched_draws():
            mapped = ft_ckpt.load(self.folder / name / "model.safetensors")
        self.readers[name] = mapped, self.weights_of(saved), saved

    @precondition(lambda self: bool(self.whole(with_state=True)) and not self.slow_readers)
    @rule(name=named(lambda self: self.whole(with_state=True)))
    def open_slowly(self, name: str) -> None:
        """Another process opens a checkpoint, and reads on when it is told to."""
        saved = self.saves[name]
        read = partial(
            read_slowly, self.folder / name, saved, self.reference_of(saved.salt).at(saved.step)
        )
        reader = Child(read)
        assert reader.told() == "open"
        self.slow_readers[name] = reader

    @precondition(lambda self: bool(self.slow_readers))
    @rule(name=named(lambda self: self.slow_readers), is_killed=st.booleans())
    def close_reader(self, name: str, is_killed: bool) -> None:
        reader = self.slow_readers.pop(name)
        if is_killed:
            reader.kill()
        else:
            reader.connection.send("go on")
            reader.end()

    @precondition(lambda self: bool(self.unread()))
    @rule(
        name=named(lambda self: self.unread()),
        file=st.integers(0, 2),
        place=st.one_of(st.just(APPENDED), st.integers(0, 10_000)),
    )
    def damage(self, name: str, file: int, place: int) -> None:
        """A byte of a file that the manifest lists is another one, or there is one more."""
        files = self.saves[name].files
        damaged = files[file % len(files)]
        path = self.folder / name / damaged
        content = bytearray(path.read_bytes())
        if place == APPENDED:
            content.append(0)
        else:
            content[place % len(content)] ^= 1
        path.write_bytes(content)
        self.saves[name] = replace(self.saves[name], damage=damaged)

    @precondition(lambda self: bool({*in_order(self.saves)[-1:]} & self.unread()))
    @rule(file=st.integers(0, 2), place=st.one_of(st.just(APPENDED), st.integers(0, 10_000)))
    def damage_the_newest(self, file: int, place: int) -> None:
        """The one that a resume takes and that no sweep drops, were it not for that byte."""
        self.damage(in_order(self.saves)[-1], file, place)
        if self.life is None:
            self.start("must", 0)

    # What must be true after each rule

    @invariant()
    def compare(self) -> None:
        """The folder with the dictionary, if one of them has changed."""
        if not self.folder.exists():
            return
        with untouched_draws():
            self.readers_see_what_they_opened()
            state = self.state_of_folder(), dict(self.saves)
            if state == self.compared:
                return
            self.listed()
            self.newest_and_best()
            self.whole_and_equal()
            self.nothing_else_touched()
            self.compared = self.state_of_folder(), dict(self.saves)

    def state_of_folder(self) -> dict[str, tuple[int, ...]]:
        """What changes with every change of a file in the folder."""
        facts = {}
        for path in self.folder.rglob("*"):
            stat = path.lstat()
            facts[str(path)] = stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
        return facts

    def listed(self) -> None:
        rows = [
            row for row in json.loads(command("ls", str(self.folder), "--json")) if "step" in row
        ]
        for row in rows:
            name = Path(row["path"]).name
            if name in self.saves and self.saves[name].may_return and row["state"]:
                self.saves[name] = replace(self.saves[name], has_state=True, may_return=False)
        facts = [tuple(row[name] for name in ("step", "state", "pinned", "valid")) for row in rows]
        found = [(Path(row["path"]).name, *values) for row, values in zip(rows, facts, strict=True)]
        for place, (name, step, state, is_pinned, is_valid) in enumerate(found):
            if name in self.unsettled() and not is_pinned:  # its pin is still with what it replaces
                found[place] = name, step, state, name in self.pinned(), is_valid
        order = in_order(self.saves)
        assert found == [(name, *self.facts_of(name)) for name in order]
        losses = [float(row["metrics"]["loss"]) for row in rows]
        # NaN is not equal to itself
        assert str(losses) == str([self.saves[name].loss for name in order])

    def newest_and_best(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            newest = ft_ckpt.latest(self.folder)
            whole = [name for name in in_order(self.saves) if not self.saves[name].is_damaged]
            assert newest == (self.folder / whole[-1] if whole else None)
            if self.saves:
                best = best_of(self.saves)
                assert ft_ckpt.best(self.folder, ("loss", "min")) == (
                    None if best is None else self.folder / best
                )

    def whole_and_equal(self) -> None:
        """Each checkpoint verifies; it loads and resumes into exactly what was saved, which is
        tried once.
        """
        for name, saved in self.saves.items():
            path = self.folder / name
            version = (path / "ft_ckpt.json").read_text()
            assert ft_ckpt.verify(path).ok == (not saved.is_damaged)
            if saved.is_damaged or self.checked.get(name) == (saved, version):
                continue
            self.checked[name] = saved, version
            assert same(loaded(path / "model.safetensors"), self.weights_of(saved))
            if saved.has_state:
                with untouched_draws():
                    life = Life(None)
                    life.saver.resume(path)
                    life.check(self.reference_of(saved.salt), saved.step, saved.number)
                    life.saver.close()

    def committed_are_whole(self) -> None:
        """At each moment what a manifest lists is there, even if nothing has cleared up yet."""
        for manifest in self.folder.glob("[!.]*/ft_ckpt.json"):
            name = manifest.parent.name
            is_damaged = name in self.saves and self.saves[name].is_damaged
            assert is_damaged or ft_ckpt.verify(manifest.parent).ok, name

    def readers_see_what_they_opened(self) -> None:
        for mapped, expected, saved in self.readers.values():
            assert same(
                {name: torch.as_tensor(tensor) for name, tensor in mapped.items()}, expected
            ), saved

    def nothing_else_touched(self) -> None:
        assert contents(self.outside) == {"checkpoint-99": b"", "checkpoint-99/victim.txt": b"mine"}
        mine = ["notes.txt", "checkpoint-of-mine/notes.txt"]
        mine += [f"{name}/notes.txt" for name in self.notes - self.unsettled()]
        assert {name: (self.folder / name).read_text() for name in mine} == dict.fromkeys(
            mine, "mine"
        )
        assert (self.folder / "linked").readlink() == self.outside

    def teardown(self) -> None:
        try:
            if self.folder.exists():
                self.finish()
        finally:
            self.patch.undo()
            for reader in self.slow_readers.values():
                reader.kill()
            if self.life is not None:
                self.life.saver.close()

    def finish(self) -> None:
        """The last process ends, and a sweep leaves nothing that belongs to nobody."""
        # of a killed process: it stays for a day
        for pattern in (".ft_ckpt-*.draft", "*/.ft_ckpt-*.draft"):
            for draft in self.folder.glob(pattern):
                os.utime(draft, (0, 0))
        if self.life is not None and not self.is_refused():
            self.wake_up_too_late()
        elif self.life is not None:
            self.end()
        self.start("auto", 0)
        if self.life is not None:
            self.end()
        for name in sorted(self.slow_readers):
            self.close_reader(name, is_killed=False)
        if self.saves:
            self.prune("--last 1", is_newest_damaged=True)
        self.compare()
        assert sorted(contents(self.folder)) == sorted(self.expected_files())

    # What the machine knows

    @property
    def reference(self) -> Reference:
        """The run without ft_ckpt that the present process follows."""
        return self.reference_of(self.salt)

    def reference_of(self, salt: int) -> Reference:
        return self.references.setdefault(salt, Reference(salt))

    def weights_of(self, saved: Saved) -> dict[str, torch.Tensor]:
        weights = self.reference_of(saved.salt).at(saved.step).weights
        return {**weights, "label": torch.tensor(float(saved.number))}

    def whole(self, *, with_state: bool = False) -> set[str]:
        """The checkpoints without damage."""
        names = {name for name, saved in self.saves.items() if saved.has_state or not with_state}
        return {name for name in names if not self.saves[name].is_damaged}

    def unread(self) -> set[str]:
        """The checkpoints without damage that nobody reads."""
        return self.whole() - self.readers.keys() - self.slow_readers.keys()

    def unsettled(self) -> set[str]:
        """The checkpoints that a killed save has left to the next save or resume to clear up."""
        beside = {
            path.name[1:].partition(".ft_ckpt-stage-")[0]
            for path in self.folder.glob(".*.ft_ckpt-stage-*")
        }
        return beside | {path.parent.name for path in self.folder.glob("*/.ft_ckpt-old-*")}

    def pinned(self) -> set[str]:
        return {name for name, saved in self.saves.items() if saved.is_pinned}

    def facts_of(self, name: str) -> tuple[int, bool, bool, bool]:
        """What `ls` says of a checkpoint."""
        saved = self.saves[name]
        return saved.step, saved.has_state, saved.is_pinned, not saved.is_damaged

    def chosen_by(self, mode: str) -> str | type[CheckpointError] | None:
        """The checkpoint that a resume takes: None for a fresh start, or the error."""
        names = [name for name in in_order(self.saves) if self.saves[name].has_state]
        if mode == "must" and not names:
            return NotACheckpointError
        if mode == "never" or not names:
            return None
        if mode == "oldest":
            names = names[:1]
        elif mode == "must":
            names = names[-1:]
        whole = [name for name in names if not self.saves[name].is_damaged]
        return whole[-1] if whole else CorruptError

    def argument_of(self, mode: str) -> str:
        """The argument of `resume`."""
        names = [name for name in in_order(self.saves) if self.saves[name].has_state]
        if mode != "oldest":
            return mode
        return names[0] if names else "auto"

    def note_start(self, mode: str, chosen: str | None) -> None:
        """A process has begun, from a checkpoint or afresh."""
        self.origin = chosen
        if chosen is None:
            self.salt, self.step, self.ancestors = self.number + 100, 0, frozenset()
            self.runs += 1
            self.run = self.runs
            return
        saved = self.saves[chosen]
        self.salt, self.step, self.run, self.ancestors = (
            saved.salt,
            saved.step,
            saved.run,
            saved.ancestors,
        )
        later = [
            other for other in self.saves.values() if other.has_state and other.run == saved.run
        ]
        if mode not in ("auto", "must", "never") and any(
            other.step > saved.step for other in later
        ):
            self.runs += 1
            self.run, self.ancestors = self.runs, saved.ancestors | {saved.run}

    def next_number(self, loss: float) -> Saved:
        """What the next save of the present process makes."""
        self.number += 1
        return Saved(self.step, self.salt, self.number, self.run, loss, self.ancestors)

    def marked(self, loss: float) -> Saved:
        """The same, with its number in the model."""
        assert self.life is not None
        saved = self.next_number(loss)
        self.life.program.mark(saved.number)
        return saved

    def is_refused(self) -> bool:
        """Whether the next save would replace a checkpoint of another run."""
        there = self.saves.get(f"checkpoint-{self.step}")
        return there is not None and there.run not in {self.run, *self.ancestors}

    def outcomes_of(self, saved: Saved) -> list[tuple[Saves, Saves]]:
        """What a save may leave that ends anywhere: nothing new, or the new one, with the sweep
        after it or a part.
        """
        name = f"checkpoint-{saved.step}"
        is_pinned = name in self.saves and self.saves[name].is_pinned
        new = {**self.saves, name: replace(saved, is_pinned=is_pinned)}
        swept = new
        if self.keep is not None:
            guarded = {*self.pinned(), *self.slow_readers, name, self.origin}
            swept = after_pruning(new, self.keep, saved.run, guarded)
        return [(self.saves, self.saves), (new, swept)]

    def left_by(self, rules: str) -> Saves:
        guarded = {*self.pinned(), *self.slow_readers, *self.unsettled()}
        return after_pruning(self.saves, RULES_OF_PRUNE[rules], None, guarded)

    def lacks_metric(self, rules: str) -> bool:
        """Whether `prune` refuses the rules, as they rank by a metric that no checkpoint has."""
        judged = [self.saves[name] for name in self.whole() if name != FINAL]
        return RULES_OF_PRUNE[rules].best is not None and all(
            math.isnan(saved.loss) for saved in judged
        )

    def adopt(self, outcomes: list[tuple[Saves, Saves]]) -> None:
        """Take over what is there, which must be one of these: everything of the first, but what
        the second lacks.
        """
        present = {
            name: self.present(name) for name in {name for saves, _ in outcomes for name in saves}
        }
        for whole, swept in outcomes:
            adopted = self.part_between(present, whole, swept)
            if adopted is not None:
                self.saves = adopted
                return
        pytest.fail(f"neither the old nor the new: {present}, expected one of {outcomes}")

    def part_between(
        self, present: dict[str, tuple[int, bool] | None], whole: Saves, swept: Saves
    ) -> Saves | None:
        adopted: Saves = {}
        for name, found in present.items():
            if found is None and name not in swept:
                continue
            if found is None or name not in whole or found[0] != whole[name].number:
                return None
            states = {whole[name].has_state, name in swept and swept[name].has_state}
            if found[1] not in states and not whole[name].may_return:
                return None
            may_return = whole[name].may_return or (whole[name].has_state and not found[1])
            adopted[name] = replace(whole[name], has_state=found[1], may_return=may_return)
        return adopted

    def present(self, name: str) -> tuple[int, bool] | None:
        """The number of the save that a committed checkpoint is of, and whether it has a training
        state.
        """
        path = self.folder / name
        if not (path / "ft_ckpt.json").exists():
            return None
        manifest = json.loads((path / "ft_ckpt.json").read_text())
        return int(manifest["metrics"]["number"]), any(
            part["kind"] == "state" for part in manifest["parts"]
        )

    def expected_files(self) -> Iterator[str]:
        """Everything that must be in the folder at the end."""
        folders = {*self.saves, *self.notes, "checkpoint-of-mine"}
        yield from ("linked", "notes.txt", *folders)
        for name in folders - self.saves.keys():
            yield f"{name}/notes.txt"
        for name, saved in self.saves.items():
            files = ["ft_ckpt.json", *saved.files]
            files += ["state"] if saved.has_state else []
            files += [".ft_ckpt-pin"] if saved.is_pinned else []
            files += ["notes.txt"] if name in self.notes else []
            yield from (f"{name}/{file}" for file in files)


def loaded(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file."""
    return dict(ft_ckpt.load(path, "cpu"))


def command(*words: str) -> str:
    """What a command prints; in a process of its own it would touch no random numbers of the
    run.
    """
    with redirect_stdout(StringIO()) as printed, warnings.catch_warnings(), untouched_draws():
        warnings.simplefilter("ignore")
        run_command(words)
    return printed.getvalue()


SEED = chosen_seed()


@pytest.mark.sample("0")
@pytest.mark.parametrize("part", range(6))
def test_a_run_against_a_dictionary(part: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """FT_CKPT_SEED tries other programs."""

    @seed(SEED + part)
    class Machine(Run):
        def __init__(self) -> None:
            super().__init__(tmp_path_factory.mktemp("run"))

    run_state_machine_as_test(
        Machine,
        settings=settings(machine_settings(examples(32)), stateful_step_count=20),
    )
