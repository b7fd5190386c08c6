"""What clocks and signals ask for while a run goes on: ranks meet for it only at steps that all of them know.

A rank that is alone has nobody to meet, and looks after every step.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ft_ckpt import schedule
from ft_ckpt.distributed.ranks import Ranks
from ft_ckpt.schedule import Every, History
from ft_ckpt.training.exchange import decide_together
from ft_ckpt.training.signals import SignalWatch


@dataclass(frozen=True)
class _Poll:
    reason: str | None  # to save now
    signal: str | None  # that has come
    next_step: int  # after which to meet again
    goes_on: bool


class ClockPoll:
    """The meetings of one run that decide by the clock and by signals, for all ranks at once."""

    def __init__(self, every: Every | None) -> None:
        self._every = every
        self._watch = SignalWatch(every.signals if every is not None else ())
        self._goes_on = True  # until rank 0 says otherwise: what asks for it may be in its environment alone
        self._next_step = 1
        self._meeting_seconds = 1.0  # what a meeting of all ranks costs: the least that was measured

    def resume_at(self, step: int) -> None:
        """Meet after the next step: the run stands at `step` on all ranks."""
        self._next_step = step + 1

    def reason_to_save(self, history: History, step: int, ranks: Ranks) -> str | None:
        """Why to save now, the same on every rank; None for no reason, or when it is not time to meet."""
        if self._every is None or not self._goes_on or (ranks.size > 1 and step < self._next_step):
            return None
        begun, signal = time.monotonic(), self._watch.received
        wanted = schedule.shared_reason(self._every, history, begun, time.time(), signal)
        next_step = schedule.next_poll(history, step, self._meeting_seconds)
        poll = _Poll(wanted, signal, next_step, schedule.needs_poll(self._every))
        told, _ = decide_together(ranks, "saver.step()", poll, _first_signal, (_Poll, _Poll))
        self._meeting_seconds = min(self._meeting_seconds, time.monotonic() - begun)
        self._next_step, self._goes_on = told.next_step, told.goes_on
        return told.signal or told.reason

    @property
    def is_signalled(self) -> bool:
        """Whether this rank has heard a signal to save and end."""
        return self._watch.received is not None

    def close(self) -> None:
        """Give signals back to whoever had them."""
        self._watch.close()


def _first_signal(polls: Sequence[_Poll]) -> _Poll:
    """Rank 0's word, and the signal of any rank."""
    return replace(polls[0], signal=next((poll.signal for poll in polls if poll.signal), None))
