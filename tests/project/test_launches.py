"""The launches of the tests: a failure on any rank fails the test, and changes no later one."""

import os
import time

import psutil
import pytest
import torch
import torch.distributed as dist
from launch import run_python
from on_ranks import RANK, WORLD, call_on_ranks, on_ranks


def test_a_launch_that_is_left_by_an_exception_is_killed_and_its_answer_dropped():
    """As by a test's timeout: each later launch of the worker got the answer of the one before
    it.
    """
    processes = []

    def interrupt(process):
        processes.append(process)
        raise TimeoutError

    with pytest.raises(TimeoutError):
        run_python("import time; time.sleep(20)", begun=interrupt)
    done = run_python("print('here'); raise SystemExit(3)")
    assert (done.returncode, done.stdout) == (3, "here\n")
    assert are_gone(processes)


def are_gone(processes):
    """Whether they have ended; where nobody waits for orphans, they stay as zombies."""
    present = [psutil.Process(process) for process in processes if psutil.pid_exists(process)]
    running = [process for process in present if process.status() != psutil.STATUS_ZOMBIE]
    left = psutil.wait_procs(running, timeout=10)[1]
    return all(process.status() == psutil.STATUS_ZOMBIE for process in left)


@on_ranks(2)
def test_each_rank_runs_the_test(tmp_path):
    (tmp_path / str(RANK)).touch()
    ranks = torch.tensor(1)
    dist.all_reduce(ranks)
    assert ranks == WORLD == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


@on_ranks(2)
def process():
    return os.getpid()


@on_ranks(2)
def difference(limit):
    numbers = [RANK, 7]
    assert max(numbers) + RANK < limit


@on_ranks(2)
def death():
    if RANK == 1:
        os._exit(5)
    dist.barrier()


@on_ranks(2, timeout=2)
def endless():
    if RANK == 1:
        time.sleep(600)


def test_functions_share_a_launch_until_one_fails():
    first = process()
    assert len({*first}) == 2
    assert process() == call_on_ranks(2, process) == first
    assert {*call_on_ranks(1, process)}.isdisjoint(first)
    with pytest.raises(
        pytest.fail.Exception,
        match=r"^\[rank 1\] Traceback[^$]*AssertionError: assert \(7 \+ 1\) < 8",
    ):
        difference(8)
    assert are_gone(first)


@pytest.mark.parametrize(
    ("function", "said"), [(death, "^rank 1 ended"), (endless, "^no answer within 2 s")]
)
def test_what_ends_or_hangs_on_one_rank_fails_the_test_and_leaves_no_process(function, said):
    processes = process()
    with pytest.raises(pytest.fail.Exception, match=said) as failure:
        function()
    assert f"in {function.__name__}" in str(failure.value) or function is death
    assert are_gone(processes)
