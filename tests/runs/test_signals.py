"""Signals, sent to real processes."""

import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from interrupts import hear_interrupts
from launch import run_python

from ft_ckpt.runs.loop import exit_code, signals
from ft_ckpt.runs.loop.signals import SignalWatch

CHILD = """
import ctypes, signal, sys, threading, time
from ft_ckpt.runs.loop.signals import SignalWatch
if "--deaf" in sys.argv:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
watch = SignalWatch(["SIGTERM", "SIGUSR1", "SIGINT"])
print("ready", flush=True)
while watch.received is None:
    time.sleep(0.01)
print(watch.received, flush=True)
# in C, without the interpreter's lock, as in a collective whose peers are gone
if "--hang" in sys.argv:
    lock = ctypes.create_string_buffer(256)
    ctypes.CDLL(None).pthread_mutex_lock(lock)
    ctypes.CDLL(None).pthread_mutex_lock(lock)
time.sleep(60)
"""
WATCHED = ("SIGTERM", "SIGUSR1", "SIGINT")


def child(*arguments):
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=hear_interrupts,
    )
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.sample("SIGTERM-0", "SIGTERM---hang")
@pytest.mark.parametrize("second", [0, "--hang"])
@pytest.mark.parametrize("name", WATCHED)
def test_the_first_is_remembered_and_the_second_ends_the_process(name, second):
    """The first asks for a save at the end of the step; whoever insists gets an end at once."""
    number, process = signal.Signals[name], child(*[second] if second else [])
    process.send_signal(number)
    assert process.stdout.readline() == f"{name}\n"
    time.sleep(signals.DUPLICATE_SECONDS / 4)
    process.send_signal(number)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(signals.DUPLICATE_SECONDS * 1.5)
    process.send_signal(number)
    assert process.wait(30) == -number


def test_another_signal_ends_the_process_too():
    process = child()
    process.send_signal(signal.SIGUSR1)
    assert process.stdout.readline() == "SIGUSR1\n"
    time.sleep(signals.DUPLICATE_SECONDS * 1.5)
    process.terminate()
    assert process.wait(30) == -signal.SIGTERM


def test_what_was_ignored_stays_ignored():
    process = child("--deaf")
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "SIGTERM\n"
    process.kill()
    process.wait()


@pytest.fixture
def handlers():
    """Python's own handlers, put back whatever a test does."""
    before = {name: signal.getsignal(signal.Signals[name]) for name in WATCHED}
    yield before
    for name, handler in before.items():
        signal.signal(signal.Signals[name], handler)


def test_handlers_are_restored(handlers):
    def mine(*_):
        heard.append("mine")

    heard = []
    signal.signal(signal.SIGUSR1, mine)
    watch = SignalWatch(WATCHED)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert (watch.received, heard) == ("SIGUSR1", [])
    time.sleep(signals.DUPLICATE_SECONDS * 1.5)
    watch.close()
    watch.close()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert (watch.received, heard) == ("SIGUSR1", ["mine"])
    assert {**handlers, "SIGUSR1": mine} == {
        name: signal.getsignal(signal.Signals[name]) for name in WATCHED
    }


def test_closing_soon_after_a_signal_leaves_the_restored_handler_alone(handlers):
    heard = []
    signal.signal(signal.SIGUSR1, lambda *_: heard.append("mine"))
    watch = SignalWatch(WATCHED)
    os.kill(os.getpid(), signal.SIGUSR1)
    watch.close()
    time.sleep(signals.DUPLICATE_SECONDS * 1.5)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert heard == ["mine"]


def test_a_handler_set_since_is_not_replaced(handlers):
    def later(*_):
        pass

    watch = SignalWatch(WATCHED)
    signal.signal(signal.SIGUSR1, later)
    watch.close()
    assert signal.getsignal(signal.SIGUSR1) is later
    assert signal.getsignal(signal.SIGTERM) == handlers["SIGTERM"]


def test_elsewhere_than_in_the_main_thread_nothing_is_watched(handlers):
    watches = []
    thread = threading.Thread(target=lambda: watches.append(SignalWatch(WATCHED)))
    thread.start()
    thread.join()
    assert "only the main thread" in watches[0].note
    watches[0].close()
    assert handlers == {name: signal.getsignal(signal.Signals[name]) for name in WATCHED}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1)])
def test_watches_end_in_any_order(handlers, order):
    watches = [SignalWatch(WATCHED) for _ in order]
    for number in order:
        watches[number].close()
    assert handlers == {name: signal.getsignal(signal.Signals[name]) for name in WATCHED}


def test_forked_children_can_be_terminated(handlers):
    """A worker of a data loader or a pool is ended by SIGTERM whatever its parent has set; the
    parent hears nothing.
    """

    def work():
        running.set()
        any(itertools.repeat(False))  # for ever, in C: no handler of Python's is run meanwhile

    earlier = SignalWatch(WATCHED)
    watch, context = SignalWatch(WATCHED), multiprocessing.get_context("fork")
    running = context.Event()
    worker = context.Process(target=work)
    worker.start()
    assert running.wait(30)
    worker.terminate()
    worker.join(30)
    if worker.exitcode is None:
        worker.kill()
    earlier.close()
    watch.close()
    assert (worker.exitcode, watch.received) == (-signal.SIGTERM, None)


def test_exit_codes():
    assert {name: exit_code(name) for name in WATCHED} == {
        "SIGTERM": 143,
        "SIGUSR1": 138,
        "SIGINT": 130,
    }
    assert exit_code("SIGTERM", 0) == 0
    written = dict(
        line.split()
        for line in exit_code.__doc__.replace("      SIG", "\nSIG").splitlines()
        if "SIG" in line
    )
    assert written == {name: str(exit_code(name)) for name in written}
    from ft_ckpt.schedule import SIGNALS

    assert set(written) == set(SIGNALS)


WITH_WORKER = """
import os, subprocess, sys, threading, time, torch
from multiprocessing import active_children
from training import prepared, learn, QUIET
from ft_ckpt import CheckpointSaver, Every
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 100
    def __getitem__(self, index): time.sleep(60 * (index > 20)); return torch.ones(2, 3)
# from another process: what a parent sends them ends loader workers without an error
def signal_all():
    pids = [os.getpid(), *(child.pid for child in active_children())]
    subprocess.run(["kill", "-TERM", *map(str, pids)])
run = prepared()
loader = torch.utils.data.DataLoader(Rows(), batch_size=None, num_workers=1)
with CheckpointSaver(run.accelerator, sys.argv[1], every=Every(), **QUIET) as saver:
    for rows in saver.remaining(loader):
        learn(run, rows)
        if saver.progress.step == 4 and sys.argv[2] == "in a step": signal_all(); time.sleep(0.5)
        saver.step()
        if saver.progress.step == 20: threading.Timer(0.5, signal_all).start()
"""


@pytest.mark.sample("in a step-5")
@pytest.mark.parametrize(("when", "saved"), [("in a step", 5), ("while a batch is awaited", 21)])
def test_a_signal_for_all_processes_of_a_job_ends_the_workers_too(tmp_path, when, saved):
    ended = run_python(WITH_WORKER, tmp_path, when)
    assert ended.returncode == 143, ended.stderr
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == [f"checkpoint-{saved}"]
