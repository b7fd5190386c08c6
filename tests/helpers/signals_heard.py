"""Child processes that receive signals, however the tests were started."""

import signal


def hear_interrupts() -> None:
    """Reset SIGINT, which background jobs of a shell and their children ignore, to its default;
    called in the child.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
