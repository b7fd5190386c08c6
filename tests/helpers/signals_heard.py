"""A child process that hears signals, however the tests were started."""

import signal


def hear_interrupts() -> None:
    """Hear SIGINT again, which a shell's background jobs ignore and their children, too; called in the child."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
