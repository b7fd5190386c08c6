"""Samples in any order: each is trained or dropped exactly once, whatever was in flight when the
run ended.
"""

import itertools
import json
import pickle
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from functools import partial

import datasets
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from launch import run_and_signal, run_python
from on_ranks import RANK, WORLD, on_ranks
from seeds import examples
from torch.utils.data import DataLoader, TensorDataset
from training import QUIET, Stream, network

from ft_ckpt import CheckpointSaver, Every, Frontier
from ft_ckpt.errors import ConfigError, CorruptError, LoadError, TicketError
from ft_ckpt.extensions.rl.samples import Ticket

# seed 1; a change makes runs unresumable
SHUFFLED = [[1, 9, 7, 5, 2, 8, 6, 3, 4, 0], [1, 2, 5, 9, 6, 4, 8, 7, 3, 0]]


def copied(frontier):
    """The state as a checkpoint returns it."""
    return json.loads(json.dumps(frontier.state_dict()))


def resumed(frontier, *args, **settings):
    other = Frontier(*args, **settings)
    other.load_state_dict(copied(frontier))
    return other


def ids(tickets):
    return [ticket.id for ticket in tickets]


class Runs(RuleBasedStateMachine):
    """A run that is saved, crashes and resumes at any moment, beside a model that lists every
    sample.
    """

    @initialize(
        count=st.integers(1, 12),
        epochs=st.integers(1, 3),
        shuffle=st.booleans(),
        seed=st.integers(0, 5),
        named=st.booleans(),
    )
    def begin(self, count, epochs, shuffle, seed, named):
        samples = [f"prompt {number}" for number in range(count)] if named else count
        self.make = lambda: Frontier(samples, epochs=epochs, shuffle=shuffle, seed=seed)
        # of one that reports nothing
        self.order = [(ticket.epoch, ticket.id) for ticket in self.make()]
        every = samples if named else range(count)
        assert [epoch for epoch, _ in self.order] == sorted([*range(epochs)] * count)
        for epoch in range(epochs):
            mine = [sample for of, sample in self.order if of == epoch]
            assert sorted(mine) == sorted(every)
            assert shuffle or mine == [*every]
        self.frontier = self.make()
        self.settled = {}  # what became of a sample, by its place in the order
        self.flying = {}  # tickets by place
        self.attempts = Counter()
        self.checkpoint = copied(self.frontier), {}
        self.void = []  # tickets from before a crash
        self.old = []  # tickets that were reported

    def places(self, tickets):
        found = [ticket.key for ticket in tickets]
        assert [(ticket.epoch, ticket.id) for ticket in tickets] == [
            self.order[place] for place in found
        ]
        return found

    @property
    def open(self):
        return [n for n in range(len(self.order)) if n not in self.settled and n not in self.flying]

    @rule(count=st.integers(0, 8))
    def take(self, count):
        expected = self.open[:count]
        tickets = self.frontier.take(count)
        assert self.places(tickets) == expected
        assert [ticket.attempt for ticket in tickets] == [
            self.attempts[place] + 1 for place in expected
        ]
        self.flying.update(zip(expected, tickets, strict=True))

    @precondition(lambda self: self.flying)
    @rule(kind=st.sampled_from(["trained", "trained", "dropped", "failed"]), data=st.data())
    def report(self, kind, data):
        chosen = data.draw(
            st.lists(st.sampled_from(sorted(self.flying)), min_size=1, max_size=4, unique=True)
        )
        # from another process
        tickets = [pickle.loads(pickle.dumps(self.flying.pop(place))) for place in chosen]
        getattr(self.frontier, kind)(*tickets)
        self.old += tickets
        for place in chosen:
            if kind == "failed":
                self.attempts[place] += 1
            else:
                self.settled[place] = kind

    @precondition(lambda self: self.old or self.void)
    @rule(kind=st.sampled_from(["trained", "dropped", "failed"]), data=st.data())
    def report_again(self, kind, data):
        ticket = data.draw(st.sampled_from(self.old + self.void))
        flying = list(self.flying.values())[:1]
        before = self.frontier.state_dict()
        with pytest.raises(TicketError, match=r"already|before a resume"):
            getattr(self.frontier, kind)(*flying, ticket)
        assert ticket not in self.frontier
        assert self.frontier.state_dict() == before

    @rule()
    def save(self):
        self.checkpoint = copied(self.frontier), dict(self.settled)

    @rule(same=st.booleans())
    def crash(self, same):
        state, settled = self.checkpoint
        if not same:  # otherwise a roll-back in the process
            self.frontier = self.make()
        self.frontier.load_state_dict(state)
        self.void += self.flying.values()
        self.old = []
        self.settled, self.flying, self.attempts = dict(settled), {}, Counter()
        assert self.frontier.state_dict() == state

    @precondition(lambda self: self.void)
    @rule(data=st.data())
    def renew(self, data):
        tickets = data.draw(
            st.lists(st.sampled_from(self.void), min_size=1, max_size=3, unique_by=lambda t: t.key)
        )
        if all(ticket.key in self.open for ticket in tickets):
            fresh = self.frontier.renew(*tickets)
            assert self.places(fresh) == [ticket.key for ticket in tickets]
            self.flying.update((ticket.key, ticket) for ticket in fresh)
        else:
            before = self.frontier.in_flight
            with pytest.raises(
                TicketError, match=r"trained or dropped already|in flight here already"
            ):
                self.frontier.renew(*tickets)
            assert self.frontier.in_flight == before

    @invariant()
    def agrees(self):
        if hasattr(self, "frontier"):
            kinds = Counter(self.settled.values())
            expected = {
                "trained": kinds["trained"],
                "dropped": kinds["dropped"],
                "in flight": len(self.flying),
            }
            assert self.frontier.counts == expected
            assert self.frontier.in_flight == [self.flying[place] for place in sorted(self.flying)]
            assert self.frontier.done == (len(self.settled) == len(self.order))
            low = next(
                (n for n in range(len(self.order)) if n not in self.settled), len(self.order)
            )
            assert self.frontier.epoch == low // self.frontier.samples

    def teardown(self):
        """The rest of the run: what was in flight, then what was never taken, until everything is
        settled.
        """
        if hasattr(self, "frontier"):
            self.crash(same=False)
            left = [ticket for ticket in self.frontier if not self.frontier.trained(ticket)]
            assert self.places(left) == [
                place for place in range(len(self.order)) if place not in self.settled
            ]
            assert self.frontier.done
            assert self.frontier.take() == []


TestRuns = Runs.TestCase
TestRuns.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("epoch", [0, 1])
def test_the_shuffled_order_is_that_of_every_version(epoch):
    tickets = Frontier(10, epochs=2, shuffle=True, seed=1).take(20)
    assert ids(tickets)[10 * epoch : 10 * epoch + 10] == SHUFFLED[epoch]


def test_shuffled_orders_are_equally_likely():
    """All 24 orders of four samples, 200 times each: the statistic of 23 degrees of freedom is over
    58 in 1e-4.
    """
    orders = Counter(tuple(ids(Frontier(4, shuffle=True, seed=seed))) for seed in range(4800))
    assert len(orders) == 24
    assert sum((count - 200) ** 2 / 200 for count in orders.values()) < 58
    places = [ids(Frontier(1000, shuffle=True, seed=seed)).index(7) for seed in range(50)]
    assert 380 < sum(places) / 50 < 620


def test_a_group_that_was_dropped_does_not_hold_up_the_rest():
    frontier = Frontier(100)
    tickets = frontier.take(10)
    frontier.dropped(tickets[0])
    frontier.trained(*tickets[2:])
    assert copied(frontier)["runs"] == "1 8"
    assert ids(resumed(frontier, 100).take(3)) == [1, 10, 11]


def test_an_epoch_begins_while_the_last_is_in_flight():
    frontier = Frontier(["a", "b", "c"], epochs=None)
    long, *others = frontier.take(3)
    frontier.trained(*others)
    assert [(ticket.id, ticket.epoch) for ticket in frontier.take(4)] == [
        ("a", 1),
        ("b", 1),
        ("c", 1),
        ("a", 2),
    ]
    assert long in frontier
    assert (frontier.epoch, frontier.done) == (0, False)


def test_a_state_is_small():
    """Of ten million samples with four thousand in flight, reported in random order."""
    frontier = Frontier(10_000_000, shuffle=True)
    flying, chance = frontier.take(4096), random.Random(0)
    for _ in range(10_000):
        index = chance.randrange(4096)
        frontier.trained(flying[index])
        flying[index] = frontier.take()[0]
    assert len(json.dumps(frontier.state_dict())) < 12_000
    frontier.trained(*flying)
    assert len(json.dumps(frontier.state_dict())) < 150


def test_threads_share_one():
    frontier, trained, lock = Frontier(2000, epochs=2, shuffle=True), [], threading.Lock()

    def consume(number):
        chance = random.Random(number)
        while not frontier.done:
            for ticket in frontier.take(chance.randint(1, 5), wait=0.5):
                if chance.random() < 0.1 and ticket.attempt < 3:
                    frontier.failed(ticket)
                    continue
                (frontier.trained if chance.random() < 0.8 else frontier.dropped)(ticket)
                with lock:
                    trained.append((ticket.epoch, ticket.id))

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=consume, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(switch)
    assert sorted(trained) == [(epoch, sample) for epoch in range(2) for sample in range(2000)]


def test_a_consumer_waits_for_what_may_fail():
    frontier = Frontier(1)
    (ticket,) = frontier.take()
    begun = time.monotonic()
    assert frontier.take(wait=0.05) == []
    assert time.monotonic() - begun >= 0.05
    threading.Timer(0.05, frontier.failed, [ticket]).start()
    (again,) = frontier.take(wait=60)
    assert (again.id, again.attempt) == (0, 2)
    threading.Timer(0.05, frontier.trained, [again]).start()
    assert frontier.take(wait=60) == []  # at the end, not after a minute
    assert frontier.done


@pytest.mark.parametrize(
    ("report", "problem"),
    [
        (
            lambda frontier, ticket: frontier.trained(ticket),
            "reported as trained or dropped already",
        ),
        (
            lambda frontier, ticket: frontier.dropped(ticket),
            "reported as trained or dropped already",
        ),
        (
            lambda frontier, ticket: frontier.trained(ticket._replace(token="0")),
            "from before a resume, or of another",
        ),
        (lambda frontier, ticket: frontier.trained([ticket]), "a list is no ticket"),
        (lambda frontier, ticket: frontier.renew(ticket), "trained or dropped already"),
        (
            lambda frontier, ticket: frontier.renew(ticket._replace(id=8)),
            "other data or another order",
        ),
        (
            lambda frontier, ticket: frontier.renew(ticket._replace(key=-1)),
            "other data or another order",
        ),
        (lambda frontier, ticket: frontier.renew(*frontier.take()), "in flight here already"),
        (lambda frontier, ticket: frontier.renew([ticket]), "a list is no ticket"),
    ],
)
def test_wrong_reports_are_refused_by_name(report, problem):
    frontier = Frontier(10)
    (ticket,) = frontier.take()
    frontier.trained(ticket)
    with pytest.raises(TicketError, match=problem):
        report(frontier, ticket)
    assert frontier.counts["trained"] == 1


def test_a_ticket_from_before_a_resume_does_not_settle_what_was_handed_out_again():
    frontier = Frontier(3)
    (before,) = frontier.take()
    frontier.load_state_dict(frontier.state_dict())
    (after,) = frontier.take()
    assert after[:4] == before[:4]
    with pytest.raises(TicketError, match="from before a resume"):
        frontier.trained(before)
    frontier.trained(after)


def test_reports_name_the_sample():
    frontier = Frontier(["one", "two"])
    one, two = frontier.take(2)
    with pytest.raises(
        TicketError,
        match=r"sample 'one' of epoch 0 \(attempt 1\): the ticket is given twice; nothing",
    ):
        frontier.trained(one, two, one)
    frontier.failed(one)
    with pytest.raises(
        TicketError,
        match=r"'one' of epoch 0 .*: reported as failed already, it comes again as attempt 2",
    ):
        frontier.trained(one, two)
    (again,) = frontier.take()
    assert frontier.in_flight == [again, two]
    with pytest.raises(TicketError, match="discard this result"):
        frontier.trained(one)
    frontier.trained(again, two)
    with pytest.raises(
        TicketError, match=r"'one' of epoch 0 \(attempt 1\): reported as trained or dropped already"
    ):
        frontier.dropped(one)


def test_renewals_are_refused_by_name():
    frontier = Frontier(10)
    tickets = frontier.take(4)
    frontier.trained(tickets[1], tickets[3])
    after = resumed(frontier, 10)
    for wrong, problem in (
        ([tickets[2], tickets[3]], "sample 3 of epoch 0 .*: trained or dropped already"),
        ([tickets[1]], "sample 1 of epoch 0 .*: trained or dropped already"),  # between open ones
        ([tickets[2], tickets[2]], "sample 2 of epoch 0 .*: in flight here already"),
    ):
        with pytest.raises(TicketError, match=problem):
            after.renew(*wrong)
        assert after.in_flight == []
    assert ids(after.renew(tickets[2], tickets[0])) == [2, 0]
    assert ids(after.take(2)) == [4, 5]


def test_reports_shorten_long_ids():
    frontier = Frontier(["once upon " * 1000])
    with pytest.raises(TicketError, match=r"^sample 'once upon .* of epoch 0") as error:
        frontier.trained(*frontier.take() * 2)
    assert len(str(error.value)) < 300


def test_results_in_a_stored_buffer_are_not_generated_again():
    frontier = Frontier(10, shuffle=True)
    buffer, generating = frontier.take(3), frontier.take(2)
    state, order = copied(frontier), ids(Frontier(10, shuffle=True))
    stored = json.loads(json.dumps(buffer))
    after = Frontier(10, shuffle=True)
    after.load_state_dict(state)
    fresh = after.renew(*(Ticket(*values) for values in stored))
    assert ids(fresh) == ids(buffer)
    assert ids(after.take(3)) == ids(generating) + order[5:6]
    after.trained(*fresh)


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        (lambda: Frontier(11, epochs=2), "number of samples is 11, 10 in the checkpoint"),
        (lambda: Frontier(10, epochs=1), "number of epochs is 1, 2 in the checkpoint"),
        (
            lambda: Frontier(10, epochs=2, shuffle=True, seed=3),
            r"seed \(None: not shuffled\) is 3, None in the checkp",
        ),
        (
            lambda: Frontier([*range(10)], epochs=2),
            "digest of the ids is .*, None in the checkpoint",
        ),
        (
            lambda: Frontier(9, shuffle=True),
            "samples is 9.*seed.*epochs is 1, 2 in .*; make the Frontier with",
        ),
    ],
)
def test_another_data_set_is_refused(other, problem):
    state, live = copied(Frontier(10, epochs=2)), other()
    live.take(2)
    with pytest.raises(LoadError, match=problem):
        live.load_state_dict(state)
    assert len(live.in_flight) == 2


def test_a_run_without_an_end_is_not_given_one():
    with pytest.raises(LoadError, match="number of epochs is 3, None in the checkpoint"):
        resumed(Frontier(10, epochs=None), 10, epochs=3)
    assert resumed(Frontier(10, epochs=3), 10, epochs=None).epochs is None


def test_ids_are_compared_with_their_order():
    state = copied(Frontier(["a", ("b", 1), b"c", 4]))
    Frontier(("a", ("b", 1), b"c", 4)).load_state_dict(state)
    with pytest.raises(LoadError, match="digest of the ids"):
        Frontier(["a", b"c", ("b", 1), 4]).load_state_dict(state)
    numbers = copied(Frontier(range(5, 8)))
    assert ids(resumed(Frontier(range(5, 8)), [5, 6, 7])) == [5, 6, 7]
    assert numbers["ids"] == copied(Frontier([5, 6, 7]))["ids"]


def test_a_finished_run_goes_on_with_more_epochs():
    frontier = Frontier(3, shuffle=True)
    frontier.trained(*frontier.take(3))
    assert resumed(frontier, 3, shuffle=True).done
    again = resumed(frontier, 3, shuffle=True, epochs=2)
    assert ids(again) == ids(Frontier(3, shuffle=True, epochs=2))[3:]


@pytest.mark.parametrize(
    "change",
    [
        {"low": -1},
        {"low": 99},
        {"low": True},
        {"low": 1.0},
        {"runs": "1"},
        {"runs": "1 0"},
        {"runs": "1 x"},
        {"runs": "9 12"},
        {"runs": [1, 1]},
        {"runs": "-1 2"},
        {"dropped": 9},
        {"epochs": "2"},
        {"dropped": None},
        {"runs": "1 " + "9" * 5000},
    ],
)
def test_a_damaged_state_is_refused(change):
    frontier = Frontier(10)
    frontier.trained(*frontier.take(4)[::2])
    with pytest.raises(CorruptError):
        Frontier(10).load_state_dict({**copied(frontier), **change})
    with pytest.raises(CorruptError, match="low missing"):
        Frontier(10).load_state_dict(
            {key: value for key, value in copied(frontier).items() if key != "low"}
        )
    with pytest.raises(LoadError, match="version 2"):
        Frontier(10).load_state_dict({**copied(frontier), "version": 2})


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: Frontier(0), "there are none"),
        (lambda: Frontier([]), "there are none"),
        (lambda: Frontier(-1), "expected their number"),
        (lambda: Frontier(True), "expected their number"),
        (lambda: Frontier(iter([1])), "expected their number"),
        (lambda: Frontier("prompts.jsonl"), "expected their number"),
        (lambda: Frontier(DataLoader(Stream())), "expected their number"),
        (lambda: Frontier([1.5]), "ids of type float"),
        (lambda: Frontier([{"prompt": 1}]), r"ids of type dict.*give len\(samples\)"),
        (lambda: Frontier([("a", (1,))]), "ids of type tuple"),
        (lambda: Frontier(3, epochs=0), "epochs=0"),
        (lambda: Frontier(3, shuffle=7, seed="a"), "shuffle=7: .*; seed='a'"),
    ],
)
def test_settings_that_cannot_work(make, problem):
    with pytest.raises(ConfigError, match=problem):
        make()


def test_a_data_set_gives_indices():
    assert ids(Frontier(TensorDataset(torch.zeros(3)))) == [0, 1, 2]
    assert ids(Frontier(datasets.Dataset.from_dict({"prompt": ["a", "b"]}))) == [0, 1]
    assert ids(Frontier(np.int64(2))) == [0, 1]


def test_a_column_gives_ids():
    assert ids(Frontier(datasets.Dataset.from_dict({"prompt": ["a", "b"]})["prompt"])) == ["a", "b"]


@pytest.mark.parametrize("call", ["take", "failed", "trained", "load_state_dict"])
def test_an_exception_of_a_signal_handler_loses_nothing(call):
    """At every line of the call: unreported samples stay open, and the object can go on."""
    for line in range(200):
        frontier, saved = Frontier(9), None
        first = frontier.take(4)
        frontier.failed(first[1])
        frontier.trained(first[2])
        saved = copied(frontier)
        arguments = {
            "take": [3],
            "failed": [first[0]],
            "trained": [first[0]],
            "load_state_dict": [saved],
        }[call]
        left = interrupted_at(line, getattr(frontier, call), *arguments)
        settled = {first[2].id} | (
            {first[0].id} if call == "trained" and first[0] not in frontier else set()
        )
        expected = [sample for sample in range(9) if sample not in settled]
        assert ids(resumed(frontier, 9)) == expected, line
        frontier.load_state_dict(copied(frontier))
        assert ids(frontier.take(9)) == expected, line
        if not left:
            return
    pytest.fail("the call does not end")


def interrupted_at(number, function, *arguments):
    """Whether the call was interrupted, before the line that it executes after so many others of
    its module.
    """
    lines = itertools.count()

    def trace(frame, event, _):
        if (
            not frame.f_code.co_filename.endswith("frontier.py")
            or "tests" in frame.f_code.co_filename
        ):
            return None
        if event == "line" and next(lines) == number:
            raise KeyboardInterrupt
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        function(*arguments)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(previous)
    return False


def test_it_needs_nothing_else():
    code = """
import sys
from ft_ckpt import Frontier
Frontier(3)
print(*sorted({"torch", "numpy"} & set(sys.modules)), end=" ")
print(*sorted(name for name in sys.modules if name.startswith("ft_ckpt.")))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ours = [
        "_version",
        "errors",
        "extensions",
        "extensions.rl",
        "extensions.rl.samples",
        "extensions.rl.samples.checks",
        "extensions.rl.samples.frontier",
        "extensions.rl.samples.shuffling",
        "messages",
    ]
    assert ended.stdout.split() == [f"ft_ckpt.{name}" for name in ours]


# With a saver

SCRIPT = """
import random, sys, time, torch
from training import QUIET, network
from ft_ckpt import CheckpointSaver, Every, Frontier

model, frontier = network(), Frontier(60, epochs=2, shuffle=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
every = Every(steps=3, signals=())
saver = CheckpointSaver(None, sys.argv[1], every=every, background=sys.argv[2] == "True", **QUIET)
with saver, open(sys.argv[3], "a") as log:
    saver.register(model=model, optimizer=optimizer, frontier=frontier)
    saver.resume()
    chance, flying = random.Random(), []
    while not frontier.done:
        flying += frontier.take(16 - len(flying))
        chance.shuffle(flying)
        done, flying = flying[:6], flying[6:]
        if len(done) > 3:
            frontier.failed(done.pop())
        dropped = [done.pop()] if len(done) > 2 else []
        frontier.dropped(*dropped)
        model(torch.ones(2, 3) * len(done)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        frontier.trained(*done)
        # one line for each step; that of a step that is repeated after a resume counts
        tickets = [f"{ticket.epoch}/{ticket.id}" for ticket in (*done, *dropped)]
        print(saver.progress.step, *tickets, file=log, flush=True)
        saver.step()
        print(saver.progress.step, flush=True)
        time.sleep(0.002)
"""


def read_lines(count, output):
    for _ in range(count):
        output.readline()


@pytest.mark.parametrize("background", [False, True])
def test_a_run_that_is_killed_settles_each_sample_once(tmp_path, background):
    """The samples of the steps that are in the last model: each of both epochs once."""
    log = tmp_path / "log"
    for steps in (5, 7):
        run_and_signal(SCRIPT, tmp_path / "run", background, log, until=partial(read_lines, steps))
    ended = run_python(SCRIPT, tmp_path / "run", background, log)
    assert ended.returncode == 0, ended.stderr
    lines = [line.split() for line in log.read_text().splitlines()]
    steps = {int(step): samples for step, *samples in lines}
    assert len(lines) > len(steps) > 20  # some were repeated
    settled = Counter(sample for samples in steps.values() for sample in samples)
    assert settled == {f"{epoch}/{sample}": 1 for epoch in range(2) for sample in range(60)}


def test_another_data_set_is_named_by_a_resume(tmp_path):
    model = network()
    CheckpointSaver(None, tmp_path, **QUIET).save_state(model, frontier=Frontier(10))
    with pytest.raises(
        LoadError, match=r"frontier: .*number of samples is 11, 10 in the checkpoint"
    ):
        CheckpointSaver(None, tmp_path, **QUIET).resume(model=model, frontier=Frontier(11))


def begin_together(folder):
    frontier = Frontier(40, epochs=2, shuffle=True)
    saver = CheckpointSaver(
        None, folder, every=Every(steps=1, signals=()), enter_timeout_seconds=60, **QUIET
    )
    saver.register(model=network(), frontier=frontier)
    saver.resume()
    return saver, frontier


@on_ranks(2)
def leader(folder):
    """Rank 0 takes and reports; the other rank has a frontier of the same arguments and does not
    use it.
    """
    for first, last in ((0, 7), (7, 13)):
        saver, frontier = begin_together(folder)
        if RANK == 0:
            # the first one was in flight at the save
            tickets = frontier.take(last - first + (first > 0))
            assert [ticket.key for ticket in tickets] == [0, *range(max(first, 1), last)], tickets
            frontier.trained(*tickets[1 + (first == 0) :])
            frontier.dropped(*tickets[1 : 1 + (first == 0)])
        shared = [frontier.counts]
        dist.broadcast_object_list(shared)
        assert (frontier.counts == shared[0]) == (RANK == 0)
        saver.step()
        saver.close()


@on_ranks(2)
def same_calls(folder):
    """Both ranks take all samples of a step and train their part; their states are equal and stored
    once.
    """
    for first, last in ((0, 7), (7, 13)):
        saver, frontier = begin_together(folder)
        tickets = frontier.take(last - first + (first > 0))
        _mine = tickets[RANK::WORLD]
        assert [ticket.key for ticket in tickets] == [0, *range(max(first, 1), last)], tickets
        frontier.dropped(*tickets[1 : 1 + (first == 0)])
        frontier.trained(*tickets[1 + (first == 0) :])
        saver.step()
        saver.close()


@on_ranks(2)
def grown(folder):
    """Two ranks resume what one rank saved."""
    _, frontier = begin_together(folder)
    assert frontier.counts["trained"] == 6
    assert [ticket.key for ticket in frontier.take(3)] == [0, 7, 8]


def test_ranks(tmp_path):
    """One frontier on rank 0, or the same calls on all ranks; both resume on another number of
    ranks.
    """
    alone = Frontier(40, epochs=2, shuffle=True)
    alone.trained(*alone.take(7)[1:])
    model = network()
    saver = CheckpointSaver(None, tmp_path / "grown", every=Every(steps=1, signals=()), **QUIET)
    saver.register(model=model, frontier=alone)
    saver.step()
    saver.close()
    grown(tmp_path / "grown")
    for together in (leader, same_calls):
        folder = tmp_path / together.__name__
        together(folder)
        frontier = Frontier(40, epochs=2, shuffle=True)
        CheckpointSaver(None, folder, **QUIET).resume(model=network(), frontier=frontier)
        assert frontier.counts == {"trained": 11, "dropped": 1, "in flight": 0}
        order = ids(Frontier(40, epochs=2, shuffle=True))
        assert ids(frontier.take(6)) == [order[0], *order[13:18]]
