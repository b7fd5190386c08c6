"""A bucket with two clients: Hypothesis orders their requests, ends them between any two, and lets
time pass.

Each client copies checkpoints into the bucket, over others and out of it, sweeps, pins and unpins.
A committed checkpoint is whole at each moment; a reader gets the bytes of one save; nobody deletes
what another one is writing; and what a dead client left is deleted when its marks have expired. A
failure prints the steps that led there as a program.
"""

import json
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from buckets import new_bucket
from hypothesis import seed, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from paced_clients import PacedClient
from reference_run import Program
from seeds import chosen_seed, examples, machine_settings

import ft_ckpt
from ft_ckpt import CheckpointSaver, Keep
from ft_ckpt.checkpoint.leases import leases, pin, unpin
from ft_ckpt.errors import (
    CheckpointError,
    CorruptError,
    NotACheckpointError,
    TargetError,
    UnreadableError,
)
from ft_ckpt.runs.folder import prune_run
from ft_ckpt.storage import Store
from ft_ckpt.storage.places import Place, open_place

MANIFEST, PIN, SAVING = "ft_ckpt.json", ".ft_ckpt-pin", ".ft_ckpt-saving"
STEPS, VARIANTS = (1, 2, 3), ("first", "second")
NAMES = [f"checkpoint-{step}" for step in STEPS]
FOREIGN = {"notes.txt": b"mine", "checkpoint-old/pytorch_model.bin": b"of another tool"}
TEN_MINUTES, DAY = 601, 24 * 3600 + 1
ENOUGH = 300  # requests of any action that waits for nobody
A_PART = st.one_of(st.just(ENOUGH), st.integers(1, 20))
KEEPS = {
    "last 1": Keep(last=1),
    "last 2": Keep(last=2),
    "states": Keep(last=3, state=Keep(last=1)),
    "all": Keep(),
}


@dataclass
class Action:
    """What a client is doing."""

    kind: str
    name: str  # of the checkpoint in the bucket; of a sweep none
    version: int = 0  # the checkpoint that is written
    result: Path | None = None  # the folder that it is read into
    left: dict[str, int] | None = None  # of a sweep that nobody disturbs: what it leaves
    seen: set[int | None] = field(default_factory=set)  # what was committed there since it began
    # what was committed there when its lease began, if nobody was at work on it
    leased: int | None = None
    # no other save to the same checkpoint, no pin or lease on it, and no marks of a dead client
    is_alone: bool = True
    is_guarded: bool = False  # another save is pinned there, and nobody unpins it meanwhile


def named(choose: Callable[["Bucket"], Collection[str]]) -> Any:
    """A strategy: one of the names that the machine has at this moment."""
    return st.runner().flatmap(lambda machine: st.sampled_from(sorted(choose(machine))))


class Bucket(RuleBasedStateMachine):
    """A run in a bucket, two clients, and what they may see."""

    def __init__(self, bucket: Store, versions: dict[int, Path], scratch: Path) -> None:
        super().__init__()
        self.bucket, self.versions, self.scratch = bucket, versions, scratch
        self.expected = {number: files_below(folder) for number, folder in versions.items()}
        self.clients = {name: PacedClient(self.note) for name in ("a", "b")}
        self.older = self.clients["a"].older
        self.clients["b"].older = self.older  # one clock
        self.actions: dict[str, Action] = {}
        self.owners: dict[str, str] = {}  # of marks: the client that put them, "" for a dead one
        self.reads = 0
        for name, data in FOREIGN.items():
            bucket.write(name, data)

    @initialize(names=st.sampled_from([[], NAMES[1:], NAMES]))
    def fill(self, names: list[str]) -> None:
        for name in names:
            ft_ckpt.copy(self.versions[int(name[-1]) * 10], Place(self.bucket, name))

    # What the clients do

    @precondition(lambda self: len(self.actions) < 2)
    @rule(
        step=st.sampled_from(STEPS),
        variant=st.sampled_from(VARIANTS),
        overwrite=st.booleans(),
        requests=A_PART,
    )
    def write(self, step: int, variant: str, overwrite: bool, requests: int) -> None:
        """Copy a checkpoint into the bucket."""
        version = step * 10 + VARIANTS.index(variant)
        name = f"checkpoint-{step}"
        goal = self.place(name)
        act = partial(ft_ckpt.copy, self.versions[version], goal, overwrite=overwrite)
        self.begin(Action("overwrite" if overwrite else "write", name, version), act, requests)

    @precondition(lambda self: not self.actions)
    @rule(step=st.sampled_from(STEPS), has_checked=st.booleans(), requests=A_PART)
    def take_over(self, step: int, has_checked: bool, requests: int) -> None:
        """The process of a client is stopped before its commit, for longer than its mark lives;
        the other client takes the folder over, and then the first one wakes up.

        If it has looked at its mark already, the other one has ended when it wakes up.
        """
        self.write(step, "first", True, 0)
        (late,) = self.actions
        last_requests = [("write", f"/{MANIFEST}")]
        if not has_checked:
            last_requests.append(("read", f"/{SAVING}"))
        while late in self.actions and not self.is_before(late, last_requests):
            self.go_on(late, 1)
        if late in self.actions:
            for stored in self.bucket.within(f"checkpoint-{step}").list():
                self.owners.pop(f"checkpoint-{step}/{stored.name}", None)
            self.pass_time(TEN_MINUTES)
            self.write(step, "second", True, ENOUGH if has_checked else requests)
            self.go_on(late, ENOUGH)

    def is_before(self, client: str, requests: list[tuple[str, str]]) -> bool:
        """Whether a client has written all files, and one of these requests is its next."""
        action = self.actions[client]
        stored = {stored.name for stored in self.bucket.within(action.name).list()}
        next_call, where = self.clients[client].next_request
        is_next = any(next_call == call and where.endswith(end) for call, end in requests)
        return is_next and self.expected[action.version].keys() <= stored

    @precondition(lambda self: len(self.actions) < 2 and bool(self.filled()))
    @rule(name=named(lambda self: self.filled()), requests=st.integers(0, 12))
    def read(self, name: str, requests: int) -> None:
        """Copy a checkpoint out of the bucket."""
        self.reads += 1
        result = self.scratch / f"read-{self.reads}"
        act = partial(ft_ckpt.copy, self.place(name), result)
        self.begin(Action("read", name, result=result), act, requests)

    @precondition(lambda self: len(self.actions) < 2)
    @rule(keep=st.sampled_from(sorted(KEEPS.keys() - {"all"})), requests=A_PART)
    def sweep(self, keep: str, requests: int) -> None:
        """Delete what rules do not keep, and what dead clients left."""
        run = Place(self.clients[self.idle()].store(self.bucket))
        self.begin(
            Action("sweep", "", left=self.left_by(keep)),
            lambda: prune_run(run, KEEPS[keep]),
            requests,
        )

    @precondition(lambda self: len(self.actions) < 2 and bool(self.filled()))
    @rule(name=named(lambda self: self.filled()), requests=st.integers(0, 5))
    def pin(self, name: str, requests: int) -> None:
        """Pin a checkpoint, or unpin it if it is pinned."""
        act = unpin if PIN in self.marks_in(name) else pin
        self.begin(Action("pin", name), partial(act, self.place(name)), requests)

    @precondition(lambda self: bool(self.actions))
    @rule(client=named(lambda self: self.actions), requests=A_PART)
    def go_on(self, client: str, requests: int) -> None:
        """Make more requests; to the end, if there are enough and it does not wait for the other
        client.
        """
        self.clients[client].go_on(requests)
        self.look_at(client)

    @precondition(lambda self: bool(self.actions))
    @rule(client=named(lambda self: self.actions))
    def crash(self, client: str) -> None:
        """The client is gone; its marks stay, and nobody renews them."""
        self.clients[client].stop()
        for mark, owner in self.owners.items():
            if owner == client:
                self.owners[mark] = ""
        del self.actions[client]

    @rule(seconds=st.sampled_from([300, TEN_MINUTES, DAY]))
    def pass_time(self, seconds: int) -> None:
        """The marks of living clients are renewed meanwhile."""
        for stored in self.bucket.list():
            if not self.owners.get(stored.name):
                key = (self.bucket.where(stored.name), stored.version, stored.modified)
                self.older[key] = self.older.get(key, 0) + seconds

    # What must be true

    @invariant()
    def compare(self) -> None:
        """What is committed is whole, and nothing of others was touched."""
        for name in NAMES:
            self.committed(name)
        assert {name: self.bucket.read(name) for name in FOREIGN} == FOREIGN

    def teardown(self) -> None:
        try:
            self.end()
        finally:
            for client in self.clients.values():
                client.stop()

    def end(self) -> None:
        """Both clients end, and two days later a sweep leaves checkpoints and what belongs to
        others.
        """
        for client in sorted(self.actions):
            self.crash(client)
        for name in self.filled():
            self.overwrite_pinned(name)
        before = {name: self.committed(name) for name in NAMES}
        for _ in range(3):  # the mark of a dead save goes a day after what it has written
            self.pass_time(DAY)
            self.sweep("all", ENOUGH)
        assert not self.actions
        assert {name: self.committed(name) for name in NAMES} == before
        expected = set(FOREIGN)
        for name, version in before.items():
            if version is not None:
                expected |= {f"{name}/{file}" for file in self.listed_files(name)} | {
                    f"{name}/{MANIFEST}"
                }
        assert {
            stored.name for stored in self.bucket.list() if not stored.name.endswith(PIN)
        } == expected
        for name, version in before.items():
            if version is not None:
                unpin(Place(self.bucket, name))
                ft_ckpt.copy(Place(self.bucket, name), self.scratch / f"end-{name}")
                assert ft_ckpt.verify(self.scratch / f"end-{name}").ok

    def overwrite_pinned(self, name: str) -> None:
        """Pin a checkpoint, and copy another one over it."""
        if PIN not in self.marks_in(name):
            self.pin(name, ENOUGH)
        version = self.committed(name)
        variant = "second" if version is not None and version % 10 == 0 else "first"
        self.write(int(name[-1]), variant, True, ENOUGH)
        assert self.committed(name) == version

    # What the machine knows

    def idle(self) -> str:
        """The client that begins the next action."""
        return next(name for name in self.clients if name not in self.actions)

    def place(self, name: str) -> Place:
        return Place(self.clients[self.idle()].store(self.bucket), name)

    def begin(self, action: Action, act: Callable[[], object], requests: int) -> None:
        """Begin an action of the idle client."""
        client = self.idle()
        if action.name:
            action.seen = {self.committed(action.name)}
            action.is_alone = not self.marks_in(action.name)
            is_another = action.seen != {action.version}
            action.is_guarded = is_another and PIN in self.marks_in(action.name)
        for other in self.actions.values():
            other.left = action.left = None
            if other.name == action.name and not {other.kind, action.kind} & {"sweep"}:
                other.is_alone = action.is_alone = False
            if other.name == action.name and "pin" in {other.kind, action.kind}:
                other.is_guarded = action.is_guarded = False
        self.actions[client] = action
        self.clients[client].begin(act)
        self.go_on(client, requests)

    def committed(self, name: str) -> int | None:
        """The save that is committed under a name, which must be whole; negative without its
        training state.
        """
        stored = {each.name for each in self.bucket.within(name).list()}
        if MANIFEST not in stored:
            return None
        version = version_of(self.bucket.read(f"{name}/{MANIFEST}"))
        for file in self.listed_files(name):
            saved = self.expected[abs(version)][file]
            assert self.bucket.read(f"{name}/{file}") == saved, f"{name}/{file} of {version}"
        return version

    def left_by(self, keep: str) -> dict[str, int] | None:
        """What rules leave: the newest by step, and pinned ones; None if there are marks of dead
        clients.
        """
        marks = {name: self.marks_in(name) for name in NAMES}
        if any(found - {PIN} for found in marks.values()):
            return None
        filled = {name: self.committed(name) for name in self.filled()}
        count = KEEPS[keep].last or len(NAMES)
        names = {*sorted(filled)[-count:], *(name for name in filled if PIN in marks[name])}
        left = {
            name: version
            for name, version in filled.items()
            if name in names and version is not None
        }
        if KEEPS[keep].state is not None:
            newest = max((name for name, version in left.items() if version > 0), default="")
            for name in left.keys() - {newest, *(name for name in left if PIN in marks[name])}:
                left[name] = -abs(left[name])
        return left

    def filled(self) -> list[str]:
        """The checkpoints that are committed."""
        return [name for name in NAMES if self.committed(name) is not None]

    def listed_files(self, name: str) -> list[str]:
        return [
            file["path"] for file in json.loads(self.bucket.read(f"{name}/{MANIFEST}"))["files"]
        ]

    def note(self, client: PacedClient, call: str, where: str) -> None:
        """After each request: who put a mark, and what is committed now."""
        name = where.removeprefix(f"{self.bucket.url}/")
        who = next(who for who, each in self.clients.items() if each is client)
        if call == "write" and ".ft_ckpt-" in name and not name.endswith(PIN):
            self.owners[name] = who
        if call == "write" and ".ft_ckpt-lease-" in name:
            others = [
                mark
                for mark in self.marks_in(self.actions[who].name)
                if mark not in (PIN, name.partition("/")[2])
            ]
            self.actions[who].leased = None if others else self.committed(self.actions[who].name)
        for action in self.actions.values():
            if action.name and MANIFEST in where:
                action.seen.add(self.committed(action.name))

    def look_at(self, client: str) -> None:
        """If an action has ended: as it may."""
        if not self.clients[client].is_done:
            return
        action, error = self.actions.pop(client), self.clients[client].error
        for mark, owner in list(self.owners.items()):
            if owner == client:
                del self.owners[mark]
        if action.kind == "read":
            self.check_read(action, error)
        elif action.kind in ("write", "overwrite"):
            refusals = TargetError, UnreadableError, CorruptError
            assert error is None or isinstance(error, refusals), repr(error)
            assert error is not None or action.version in action.seen
            assert error is not None or not action.is_guarded
            may_write = action.kind == "overwrite" or action.seen <= {None, action.version}
            assert error is None or not (action.is_alone and may_write), repr(error)
        elif error is not None and not isinstance(error, (NotACheckpointError, UnreadableError)):
            raise error
        if action.left is not None:
            assert {name: self.committed(name) for name in self.filled()} == action.left

    def check_read(self, action: Action, error: BaseException | None) -> None:
        assert error is None or isinstance(error, CheckpointError), repr(error)
        if error is not None:
            assert action.leased is None, f"{action.leased} was leased: {error!r}"
            return
        assert action.result is not None
        assert ft_ckpt.verify(action.result).ok
        version = version_of((action.result / MANIFEST).read_bytes())
        assert version in action.seen
        assert action.leased in (None, version)

    def marks_in(self, name: str) -> set[str]:
        """The marks in the folder of a checkpoint."""
        return {
            stored.name
            for stored in self.bucket.within(name).list()
            if stored.name.startswith(".ft_ckpt-")
        }


def version_of(manifest: bytes) -> int:
    """The number of the save in a manifest; negative without its training state."""
    facts = json.loads(manifest)
    has_state = any(part["kind"] == "state" for part in facts["parts"])
    number = int(facts["metrics"]["number"])
    return number if has_state else -number


def files_below(folder: Path) -> dict[str, bytes]:
    """The files of a checkpoint, but its manifest."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Checkpoints of one run, two of each step; a number that is a metric tells them apart."""
    folder = tmp_path_factory.mktemp("versions")
    saved = {}
    program = Program()
    with CheckpointSaver(None, folder, on_difference="ignore") as saver:
        saver.register(**program.objects)
        saver.resume()
        program.begin(1)
        train = program.train(saver)
        for step in STEPS:
            next(train)
            for variant in range(len(VARIANTS)):
                number = step * 10 + variant
                program.mark(number)
                saved[number] = folder / str(number)
                extra = {
                    "config.json": json.dumps({"number": number}),
                    "more/notes.txt": f"of {number}",
                }
                saver.save_state(path=saved[number], metrics={"number": number}, extra_files=extra)
    return saved


SEED = chosen_seed()


@pytest.mark.sample("memory")
@pytest.mark.parametrize("kind", ["memory", "S3"])
def test_two_clients_of_a_bucket(
    kind: str,
    versions: dict[int, Path],
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FT_CKPT_SEED tries other programs."""
    pytest.importorskip("obstore")
    if kind == "S3":
        request.getfixturevalue("s3")
    # who waits for another client asks again at once
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    # `pass_time` renews the marks of living clients
    monkeypatch.setattr(leases, "RENEWAL_SECONDS", 1e6)
    runs = count()

    @seed(SEED)
    class Machine(Bucket):
        def __init__(self) -> None:
            bucket = (
                new_bucket()
                if kind == "memory"
                else open_place(f"s3://bucket/run-{next(runs)}").folder
            )
            super().__init__(bucket, versions, tmp_path_factory.mktemp("reads"))

    run_state_machine_as_test(
        Machine,
        settings=settings(machine_settings(examples(120)), stateful_step_count=30),
    )
