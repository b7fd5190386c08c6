"""The launches of the tests: one that a test leaves by an exception changes no later one."""

import psutil
import pytest
from launch import run_python


def test_a_launch_that_is_left_by_an_exception_is_killed_and_its_answer_dropped():
    """As by a test's timeout: each later launch of the worker got the answer of the one before it."""
    processes = []

    def interrupt(process):
        processes.append(process)
        raise TimeoutError

    with pytest.raises(TimeoutError):
        run_python("import time; time.sleep(20)", begun=interrupt)
    done = run_python("print('here'); raise SystemExit(3)")
    assert (done.returncode, done.stdout) == (3, "here\n")
    assert not any(psutil.pid_exists(process) for process in processes)
