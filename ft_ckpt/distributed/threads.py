"""A thread for as long as a block of code runs."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def beside_thread(name: str, work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run `work` in a daemon thread while the block runs; it returns soon after the event it is given is set."""
    done = threading.Event()
    thread = threading.Thread(target=work, args=(done,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
