"""Decides on saves by clocks and signals, together on all ranks; and runs rehearsals.

A rehearsal is a run of a script for `ft-ckpt check-resume`, which records each step and ends the
script early.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from ft_ckpt import schedule
from ft_ckpt.errors import ConfigError, MissingError, NameTakenError
from ft_ckpt.ranks import Ranks, Values
from ft_ckpt.runs.loop.signals import SignalWatch
from ft_ckpt.schedule import Every, History
from ft_ckpt.storage.local import LocalStore


class ClockPoll:
    """Decides on saves by the clock of rank 0 and by the signals that any rank has received.

    Clocks and signals differ between ranks, so all ranks exchange them at some steps (a poll).
    """

    def __init__(self, every: Every | None) -> None:
        self._every = every
        self._watch = SignalWatch(every.signals if every is not None else ())
        # whether to poll; rank 0 decides, because environments may differ
        self._goes_on = True
        # step of the next poll
        self._next_step = 1
        # shortest time that a poll has taken
        self._poll_seconds = 1.0

    def resume_at(self, step: int) -> None:
        """Poll after the step that follows `step`, at which the run is on all ranks."""
        self._next_step = step + 1

    def reason_to_save(self, history: History, step: int, ranks: Ranks) -> str | None:
        """Return why to save now, the same on every rank.

        Returns None if there is no reason, or if no poll is due.
        """
        if self._every is None or not self._goes_on:
            return None
        if ranks.size > 1 and step < self._next_step:
            return None
        begun = time.monotonic()
        signal = self._watch.received
        value = {
            "reason": schedule.shared_reason(self._every, history, begun, time.time(), signal),
            "signal": signal,
            "next_step": schedule.next_poll(history, step, self._poll_seconds),
            "goes_on": schedule.needs_poll(self._every),
        }
        poll: dict[str, Any] = ranks.agree("saver.step()", value, decide=_merge_polls).result
        self._poll_seconds = min(self._poll_seconds, time.monotonic() - begun)
        self._next_step = poll["next_step"]
        self._goes_on = poll["goes_on"]
        reason: str | None = poll["signal"] or poll["reason"]
        return reason

    @property
    def is_signalled(self) -> bool:
        """Whether this rank has received a signal to save and end."""
        return self._watch.received is not None

    def close(self) -> None:
        """Restore the previous signal handlers."""
        self._watch.close()


def _merge_polls(polls: Values) -> dict[str, Any]:
    """Return rank 0's decision, with the first signal that a rank has received."""
    signals = [poll["signal"] for poll in polls if poll["signal"]]
    return {**polls[0], "signal": signals[0] if signals else None}


# environment variable with the `Rehearsal` as JSON
VARIABLE = "FT_CKPT_REHEARSAL"
# folder of the checkpoint after the last step
END = "rehearsal-end"


@dataclass(frozen=True)
class Rehearsal:
    """What a script does when `check-resume` rehearses it.

    The script ends with exit code 0 on all ranks, after a checkpoint.

    Attributes:
        directory: The folder for checkpoints, instead of the saver's own.
        record: The file to which rank 0 adds a line of JSON for each step.
        steps: The step after which the script ends with a checkpoint called END.
        stop: The step after which the script ends with a checkpoint to resume from. None: it goes
            on to `steps`.
    """

    directory: str
    record: str
    steps: int
    stop: int | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Step:
    """The record of one step of a rehearsal.

    Attributes:
        number: The number of the step.
        metrics: The metrics as exact hexadecimal text, such as "0x1.8p+1".
        batches: A digest of the batches that `saver.remaining` has yielded since the previous step.
            None if there were none.
    """

    number: int
    metrics: Mapping[str, str]
    batches: str | None


class Recorder:
    """Records the batches and steps of a rehearsed script, in its process, and ends it."""

    def __init__(self, rehearsal: Rehearsal) -> None:
        self.directory = rehearsal.directory
        self._rehearsal = rehearsal
        # running digest of the batches since the last step; None without any
        self._batches: Any = None
        # An empty record says that the script has made a saver.
        record = Path(rehearsal.record)
        with suppress(NameTakenError):
            _store_of(record).write(record.name, b"", create_only=True)

    def watch_batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches, and add their contents to the digest of the step."""
        for batch in batches:
            if self._batches is None:
                self._batches = xxhash.xxh3_128()
            _digest_value(self._batches, batch)
            yield batch

    def record_step(
        self,
        number: int,
        metrics: Mapping[str, Any],
        is_saved: bool,
        is_main: bool,
        save: Callable[[Path | None], object],
    ) -> None:
        """Record a step. After the last one save, and end the process (SystemExit).

        Call it on every rank. `save` saves to a path, or with None to the run's directory. If
        `is_saved`, the step has a checkpoint already.
        """
        if is_main:
            digest = None if self._batches is None else self._batches.hexdigest()
            exact_metrics = {name: float(value).hex() for name, value in metrics.items()}
            line = json.dumps(asdict(Step(number, exact_metrics, digest))) + "\n"
            record = Path(self._rehearsal.record)
            store = _store_of(record)
            store.write(record.name, store.read(record.name) + line.encode())

        self._batches = None
        if number >= self._rehearsal.steps:
            save(Path(self._rehearsal.directory) / END)
        elif self._rehearsal.stop is None or number < self._rehearsal.stop:
            return
        elif not is_saved:
            save(None)

        sys.exit(0)


def start_recorder() -> Recorder | None:
    """Return the recorder of this process; None if this is no rehearsal.

    Raises ConfigError if the environment variable is invalid.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    try:
        return Recorder(Rehearsal(**json.loads(text)))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{VARIABLE}={text!r}: {error}; only `ft-ckpt check-resume` sets it, unset it"
        ) from error


def read_steps(record: Path) -> list[Step] | None:
    """Read the recorded steps of a script; return None if the script made no saver."""
    try:
        text = _store_of(record).read(record.name).decode()
    except MissingError:
        return None
    return [Step(**json.loads(line)) for line in text.splitlines()]


def _store_of(record: Path) -> LocalStore:
    """Open the folder of the record. Its files need not survive a crash."""
    return LocalStore(record.parent, syncs=False)


def _digest_value(digest: Any, value: Any) -> None:
    """Add the contents of a batch to `digest`.

    Tensors and arrays are added by their bytes, strings and numbers by their values, and other
    objects by their class. Mappings, lists and tuples are added item by item.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            digest.update(repr(key).encode())
            _digest_value(digest, item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _digest_value(digest, item)
    elif hasattr(value, "detach"):
        import torch  # here, because the command that reads the record does not need torch

        local = value.to_local() if hasattr(value, "to_local") else value
        digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
        digest.update(local.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    elif hasattr(value, "tobytes"):
        digest.update(value.tobytes())
    elif isinstance(value, (str, bytes, int, float)):
        digest.update(repr(value).encode())
    else:
        digest.update(type(value).__name__.encode())
