"""Threads of ours give way to training: a small share of the processor, and of the disk where that is asked for."""

import ctypes
import os
import platform
import sys
import threading
from contextlib import suppress

_NICE = 10  # a tenth of what a thread of training gets while both want the same processor
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "riscv64": 30, "ppc64le": 273, "s390x": 282}  # number of the system call
_THREAD, _BEST_EFFORT, _LAST = 1, 2 << 13, 7  # not the idle class: it gets nothing as long as anybody wants the disk


def yield_to_training(low_io: bool) -> None:
    """Lower the priority of the calling thread for the rest of its life; threads that it starts have it too.

    With `low_io` its reads and writes come last as well, where the disk's scheduler looks at that. Nothing happens
    where the system has no priorities for threads, or forbids it.
    """
    if not sys.platform.startswith("linux"):
        return  # elsewhere it would be that of the whole process
    thread = threading.get_native_id()
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, max(os.getpriority(os.PRIO_PROCESS, thread), _NICE))
    if low_io and platform.machine() in _IOPRIO_SET:
        number = ctypes.c_long(_IOPRIO_SET[platform.machine()])
        ctypes.CDLL(None).syscall(number, _THREAD, thread, _BEST_EFFORT | _LAST)
