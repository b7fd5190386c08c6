"""The lease of a run's directory: processes that train into one folder or bucket at once, end, stop
and come back.
"""

import gc
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from launch import run_python
from namespaces import can_mount
from on_ranks import call_on_ranks
from places import TESTS
from training import QUIET, learn, prepared

import ft_ckpt
from ft_ckpt import CheckpointSaver, processes
from ft_ckpt.checkpoint.catalog import discover
from ft_ckpt.checkpoint.leases import put_mark, read_mark
from ft_ckpt.errors import ConfigError, LeaseTakenError, RanksDisagreeError
from ft_ckpt.runs.folder import lease as run_lease
from ft_ckpt.storage.places import open_place

FORK = multiprocessing.get_context("fork")
needs_namespaces = pytest.mark.skipif(not can_mount(), reason="needs namespaces, which root has")
ELSEWHERE = "node-7"
RUN_LEASE = ".ft_ckpt-run"


def trainer(run, **settings):
    model = torch.nn.Linear(2, 2)
    saver = CheckpointSaver(None, run, **settings)
    saver.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    return saver


def stepped(saver):
    saver.step({"loss": 1.0})
    return saver.save_state()


def mark(run):
    return read_mark(open_place(run).folder, RUN_LEASE)


def wait_for(is_so):
    until = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < until, "waited for 20 s"
        time.sleep(0.02)


def has_mark(run):
    return open_place(run).folder.stat(RUN_LEASE) is not None


TRAIN = """
import sys, time
from pathlib import Path
import torch
from ft_ckpt import CheckpointSaver
from ft_ckpt.runs.folder import lease as run_lease
from ft_ckpt.errors import LeaseTakenError

run, room, host, ahead, lease, renew = sys.argv[1:]
run_lease.LEASE_SECONDS, run_lease.RENEW_SECONDS = float(lease), float(renew)
if host:
    from namespaces import take_host_name
    take_host_name(host)
steady = run_lease.steady_seconds
run_lease.steady_seconds = lambda: steady() + float(ahead)
room, model = Path(room), torch.nn.Linear(2, 2)
with CheckpointSaver(None, run) as saver:
    saver.resume(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    saver.step()
    saver.save_state()
    (room / "ready").touch()
    while not (room / "go").exists():
        time.sleep(0.02)
    saver.step()
    try:
        saver.save_state()
    except LeaseTakenError as error:
        print(error)
"""


@dataclass
class Trainer:
    """A process that trains into a folder: it saves once, waits for `go`, saves again and ends."""

    room: Path
    pid: int | None = None
    thread: threading.Thread | None = None
    output: str = ""

    def second_save(self):
        """The error of its second save, "" for none; afterwards it has ended."""
        (self.room / "go").touch()
        self.thread.join(30)
        return self.output

    def signal(self, number):
        if self.pid is not None and self.thread.is_alive():
            os.kill(self.pid, number)

    def kill(self):
        self.signal(signal.SIGKILL)
        self.thread.join(30)


@contextmanager
def training(run, host="", clock_ahead=0.0):
    """A process that trains into `run`, on another host if `host` is its name."""
    room = Path(tempfile.mkdtemp())
    first = Trainer(room)

    def work():
        arguments = [run, room, host, clock_ahead, run_lease.LEASE_SECONDS, run_lease.RENEW_SECONDS]
        answer = run_python(TRAIN, *arguments, begun=partial(setattr, first, "pid"))
        first.output = answer.stdout + answer.stderr

    first.thread = threading.Thread(target=work)
    first.thread.start()
    try:
        until = time.monotonic() + 120  # the first process loads the libraries
        # the process may be ready before this process has its id
        while first.pid is None or not (room / "ready").exists():
            assert first.thread.is_alive(), first.output
            assert time.monotonic() < until, "it has saved nothing"
            time.sleep(0.02)
        yield first
    finally:
        first.kill()
        shutil.rmtree(room)


@pytest.fixture
def short(monkeypatch):
    """A lease of a second, here and in the processes that are forked from now on."""
    monkeypatch.setattr(run_lease, "LEASE_SECONDS", 1.2)
    monkeypatch.setattr(run_lease, "RENEW_SECONDS", 0.3)


@pytest.fixture(params=["disk", "bucket"])
def run(request, tmp_path):
    if request.param == "disk":
        return tmp_path / "run"
    pytest.importorskip("obstore")
    request.getfixturevalue("s3")
    return "s3://bucket/run"


def test_a_second_process_is_told_who_trains_there(run):
    with training(run) as first:
        second = trainer(run)
        node = os.uname().nodename
        expected = (
            rf"run: process {first.pid} on {node} trains into it for \d+ s, "
            r"its lease was renewed \d+ s"
        )
        for action in (
            second.resume,
            lambda: stepped(second),
            lambda: second.save(torch.nn.Linear(1, 1), step=9),
        ):
            with pytest.raises(LeaseTakenError, match=expected):
                action()
        assert [info.name for info in discover(open_place(run))] == ["checkpoint-1"]
        assert first.second_save() == f"a fresh start: nothing was resumed from {run}\n"
        assert not has_mark(run), "its end releases it"
        assert second.resume().step == 2
        assert stepped(second).step == 3
        second.close()
    assert not has_mark(run)


def test_what_needs_no_lease(run, tmp_path):
    """Readers, commands and saves to other places go on beside a run; `lease=False` does, too."""
    with training(run) as first:
        checkpoint = ft_ckpt.latest(run)
        assert ft_ckpt.verify(checkpoint).ok
        ft_ckpt.load_model(checkpoint, into=torch.nn.Linear(2, 2))
        second = trainer(run)
        second.save(torch.nn.Linear(1, 1), tmp_path / "elsewhere")
        second.close()
        third = trainer(run, lease=False)
        assert third.resume().step == 1
        third.close()
        assert mark(run)["pid"] == first.pid
        assert first.second_save() == f"a fresh start: nothing was resumed from {run}\n"


def test_a_killed_process_is_followed_at_once(run):
    with training(run) as first:
        first.kill()
        assert mark(run)["pid"] == first.pid
        begun = time.monotonic()
        with trainer(run) as saver:
            assert saver.resume().step == 1
            assert mark(run)["pid"] == os.getpid()
        assert time.monotonic() - begun < run_lease.LEASE_SECONDS / 4


def test_a_stopped_process_is_followed_after_a_while_and_refuses_to_write(run, short, caplog):
    with training(run) as first:
        first.signal(signal.SIGSTOP)
        time.sleep(1.5)
        with caplog.at_level(logging.WARNING), trainer(run) as saver:
            assert saver.resume().step == 1
            told = [line for line in caplog.messages if f"process {first.pid} on" in line]
            assert "waiting 1 s for a renewal of its lease" in told[0]
            first.signal(signal.SIGCONT)
            refusal = first.second_save()
            assert f"taken over by process {os.getpid()} on" in refusal
            assert mark(run)["pid"] == os.getpid(), "its end leaves our lease alone"
            assert stepped(saver).step == 2
    assert not has_mark(run)
    assert ft_ckpt.verify(ft_ckpt.latest(run)).ok


@needs_namespaces
@pytest.mark.parametrize("clock_ahead", [0.0, 1e6, -1e6])
def test_a_process_of_another_host(tmp_path, short, caplog, clock_ahead):
    """Alive it is told of, dead it is waited for; its clock counts for nothing."""
    run = tmp_path / "run"
    with training(run, ELSEWHERE, clock_ahead) as first:
        second = trainer(run)
        with pytest.raises(
            LeaseTakenError, match=f"process {first.pid} on {ELSEWHERE} trains into it"
        ):
            second.resume()
        first.kill()
        begun = time.monotonic()
        with caplog.at_level(logging.WARNING):
            assert second.resume().step == 1
        assert time.monotonic() - begun > run_lease.LEASE_SECONDS
        assert any(
            f"process {first.pid} on {ELSEWHERE} may train into it" in line
            for line in caplog.messages
        )
        second.close()


@pytest.mark.parametrize(
    ("changes", "waits"),
    [
        ({"started": "1"}, False),  # its number is used again
        ({"machine": "another boot"}, True),
        ({"namespace": "pid:[1]"}, True),  # another container
        ({"host": ELSEWHERE}, True),
        ({"pid": "x"}, True),
        ({}, False),  # this process before an exec
    ],
)
def test_marks_of_processes_that_are_gone(tmp_path, short, changes, waits):
    folder = open_place(tmp_path).folder
    put_mark(folder, RUN_LEASE, **changes)
    begun = time.monotonic()
    with trainer(tmp_path) as saver:
        saver.resume()
        assert (time.monotonic() - begun > run_lease.LEASE_SECONDS) == waits
        assert mark(tmp_path)["started"] == processes.process_facts()["started"]


@pytest.mark.parametrize("text", ["", "{", "[1]", "\0" * 300])
def test_a_mark_that_says_nothing_expires(tmp_path, short, text):
    (tmp_path / RUN_LEASE).write_text(text)
    with trainer(tmp_path) as saver:
        saver.resume()
        assert mark(tmp_path)["pid"] == os.getpid()


def test_savers_of_one_process_share_the_lease(tmp_path):
    """At once, one after the other, and in a notebook that closes none."""
    first, second = trainer(tmp_path), trainer(tmp_path)
    stepped(first)
    second.resume()
    token = mark(tmp_path)["token"]
    first.close()
    assert mark(tmp_path)["token"] == token
    second.close()
    assert not has_mark(tmp_path)
    for step in (2, 3, 4):
        notebook = trainer(tmp_path)
        notebook.resume()
        assert stepped(notebook).step == step
        assert mark(tmp_path)["pid"] == os.getpid()


def test_a_process_that_wakes_up_looks_at_the_lease_before_it_commits(tmp_path, monkeypatch):
    """Its next renewal, which would find the mark of the process that has taken over, may come too
    late.
    """
    saver = trainer(tmp_path)
    stepped(saver)
    put_mark(open_place(tmp_path).folder, RUN_LEASE, token="another")
    later = processes.steady_seconds() + 100
    monkeypatch.setattr(run_lease, "steady_seconds", lambda: later)
    with pytest.raises(LeaseTakenError, match="taken over by process"):
        stepped(saver)
    assert [info.manifest.step for info in discover(open_place(tmp_path))] == [1]


def test_a_saver_that_is_dropped_leaves_the_folder(tmp_path, short):
    stepped(trainer(tmp_path))
    assert has_mark(tmp_path)
    gc.collect()
    wait_for(lambda: not has_mark(tmp_path))
    saver = trainer(tmp_path)
    saver.resume()
    assert has_mark(tmp_path)


def test_a_forked_child_is_another_process(tmp_path):
    with trainer(tmp_path) as saver:
        stepped(saver)
        outcome = FORK.Queue()

        def work():
            with suppress(LeaseTakenError):
                stepped(saver)
                outcome.put("saved")
            saver._end_use(save=False)
            outcome.put(mark(tmp_path))
            outcome.close()
            outcome.join_thread()
            os._exit(0)

        child = FORK.Process(target=work)
        child.start()
        assert outcome.get(timeout=30)["pid"] == os.getpid()
        child.join()
        assert mark(tmp_path)["pid"] == os.getpid()
        assert stepped(saver).step == 2


@pytest.mark.parametrize("what", ["delete", "move"])
def test_a_folder_that_goes_away(tmp_path, monkeypatch, what):
    """A renewal does not make it again; the next save does, and then a renewal puts the mark."""
    monkeypatch.setattr(run_lease, "RENEW_SECONDS", 0.3)
    run = tmp_path / "run"
    with trainer(run) as saver:
        stepped(saver)
        if what == "delete":
            while run.exists():  # a renewal may put its mark while files are deleted
                shutil.rmtree(run, ignore_errors=True)
        else:
            run.rename(tmp_path / "aside")
        time.sleep(2.5 * run_lease.RENEW_SECONDS)
        assert not run.exists()
        assert stepped(saver).step == 2
        wait_for(lambda: has_mark(run))
        assert mark(run)["pid"] == os.getpid()
        if what == "move":
            with trainer(tmp_path / "aside") as other:
                assert other.resume().step == 1
    assert not has_mark(run)


def test_a_folder_without_room_for_a_lease(tmp_path, caplog):
    (tmp_path / RUN_LEASE).mkdir()
    with caplog.at_level(logging.WARNING), trainer(tmp_path) as saver:
        saver.resume()
        assert stepped(saver).step == 1
    assert "no lease of it, so other processes may train into it" in caplog.messages[0]


def test_each_renewal_changes_the_mark(tmp_path, short):
    with trainer(tmp_path) as saver:
        stepped(saver)
        first = mark(tmp_path)
        wait_for(lambda: mark(tmp_path)["renewals"] >= first["renewals"] + 2)
        assert mark(tmp_path)["token"] == first["token"]


@pytest.mark.parametrize("before", ["nothing", "the lease of a dead process"])
def test_several_that_begin_at_once(tmp_path, before):
    """Of all that find no lease, or a dead one, at the same moment, one goes on."""
    if before != "nothing":
        put_mark(open_place(tmp_path).folder, RUN_LEASE, started="1")
    start, outcome = FORK.Barrier(4), FORK.Queue()

    def work():
        saver = trainer(tmp_path)
        start.wait(30)
        try:
            saver.resume()
            stepped(saver)
            outcome.put("")
        except LeaseTakenError as error:
            outcome.put(str(error))
        start.wait(30)
        outcome.close()
        outcome.join_thread()
        os._exit(0)

    children = [FORK.Process(target=work) for _ in range(4)]
    for child in children:
        child.start()
    texts = [outcome.get(timeout=60) for _ in children]
    for child in children:
        child.join()
    assert texts.count("") == 1, texts
    assert len([*tmp_path.glob("checkpoint-*")]) == 1


def test_independent_ranks_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    saver = trainer(tmp_path)
    for action in (saver.resume, lambda: stepped(saver)):
        with pytest.raises(RanksDisagreeError, match=r"WORLD_SIZE=2.*no process group"):
            action()
    assert [*tmp_path.iterdir()] == []
    assert stepped(trainer(tmp_path, lease=False)).step == 1


@pytest.mark.parametrize("value", ["yes", None, 1])
def test_the_setting(value):
    with pytest.raises(ConfigError, match=r"lease=.*expected True or False"):
        CheckpointSaver(None, lease=value)


def are_refused(run, holder):
    """Another process trains into the folder of the run: rank 0 finds it, and both ranks raise."""
    saver = CheckpointSaver(prepared().accelerator, run, enter_timeout_seconds=30, **QUIET)
    for action in (saver.resume, saver.save_state):
        with pytest.raises(LeaseTakenError, match=f"process {holder} on .* trains into it"):
            action()


def test_all_ranks_are_told(tmp_path):
    """Two ranks that begin to train into the folder of this process."""
    with trainer(tmp_path / "run") as saver:
        stepped(saver)
        call_on_ranks(2, are_refused, tmp_path / "run", os.getpid())
        assert stepped(saver).step == 2


def train_and_die(place):
    """Killed after a save, twice; each time new processes go on at once."""
    run = prepared()
    lives = len([*place.glob("checkpoint-*")])
    begun = time.monotonic()
    with CheckpointSaver(run.accelerator, place, enter_timeout_seconds=30, **QUIET) as saver:
        assert saver.resume().step == lives
        assert time.monotonic() - begun < 20
        learn(run, torch.ones(2, 3))
        saver.step()
        saver.save_state()
        dist.barrier()
        if lives < 2:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_ranks_that_are_killed_and_started_again(tmp_path):
    """As a launcher does after a crash."""
    run = tmp_path / "run"
    for _ in range(2):
        with pytest.raises(pytest.fail.Exception, match="ended its process"):
            call_on_ranks(2, train_and_die, run)
        assert mark(run), "left by the killed rank 0"
    call_on_ranks(2, train_and_die, run)
    assert not mark(run)


@pytest.mark.slow
def test_a_rehearsal_beside_the_run(tmp_path):
    """`check-resume` of a script whose own folder is in use."""
    with trainer(tmp_path / "runs") as saver:
        stepped(saver)
        code = "from ft_ckpt.cli import main; main()"
        script = TESTS / "scripts" / "rehearsed.py"
        answer = run_python(
            code, "check-resume", "--steps", 3, "--stop", 2, script, timeout=200, cwd=tmp_path
        )
        assert answer.returncode == 0, answer.stderr


TORCHRUN = """
import os, signal, sys
from pathlib import Path
import torch
import torch.distributed as dist
from ft_ckpt import CheckpointSaver

dist.init_process_group("gloo")
run, model = Path(sys.argv[1]), torch.nn.Linear(2, 2)
with CheckpointSaver(None, run, on_difference="ignore") as saver:
    step = saver.resume(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)).step
    assert step == (os.environ["TORCHELASTIC_RESTART_COUNT"] != "0")
    saver.step()
    saver.save_state()
    if step == 0 and dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
"""


@pytest.mark.slow
def test_a_restart_of_torchrun(tmp_path):
    """Rank 0 is killed after a save: the agent ends the other rank and starts both again, which go
    on at once.

    The agent's store still has the agreements of the killed ranks, whose weights differed.
    """
    (tmp_path / "train.py").write_text(TORCHRUN)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--max-restarts=1",
    ]
    command += ["--monitor-interval=0.5", str(tmp_path / "train.py"), str(tmp_path / "run")]
    with (tmp_path / "log").open("w") as log:
        agent = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        assert agent.wait(280) == 0, (tmp_path / "log").read_text()
    finally:
        agent.kill()
        agent.wait()
        for pid in psutil.pids():
            with suppress(psutil.Error):
                if str(tmp_path / "train.py") in psutil.Process(pid).cmdline():
                    psutil.Process(pid).kill()
    assert ft_ckpt.latest(tmp_path / "run").name == "checkpoint-2"
    assert not has_mark(tmp_path / "run")
