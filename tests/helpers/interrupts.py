"""Child processes that receive signals, however the tests were started."""

import signal


def hear_interrupts() -> None:
    """Reset SIGINT to its default, in the child: background jobs of a shell ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
