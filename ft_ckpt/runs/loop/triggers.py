"""Triggers of saves during a run, agreed on by all ranks: clocks, signals and rehearsals."""

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
    """Polls all ranks of a run to decide on saves, by rank 0's clock and by signals of any rank."""

    def __init__(self, every: Every | None) -> None:
        self._every = every
        self._watch = SignalWatch(every.signals if every is not None else ())
        self._goes_on = True  # whether to poll; rank 0 decides, because environments may differ
        self._next_step = 1
        self._poll_seconds = 1.0  # the least measured cost of a poll of all ranks

    def resume_at(self, step: int) -> None:
        """Poll after the next step: the run is at `step` on all ranks."""
        self._next_step = step + 1

    def reason_to_save(self, history: History, step: int, ranks: Ranks) -> str | None:
        """Return why to save now, the same on every rank.

        Returns None if there is no reason, or if no poll is due.
        """
        if self._every is None or not self._goes_on or (ranks.size > 1 and step < self._next_step):
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
    """Combine rank 0's decision with the first signal that any rank received."""
    return {**polls[0], "signal": next((poll["signal"] for poll in polls if poll["signal"]), None)}


VARIABLE = "FT_CKPT_REHEARSAL"
END = "rehearsal-end"  # folder of the checkpoint after the last step


@dataclass(frozen=True)
class Rehearsal:
    """The task of a script that `check-resume` rehearses.

    The script ends with exit code 0 on all ranks, after a checkpoint.
    """

    directory: str  # for checkpoints, instead of the saver's own
    record: str  # file to which rank 0 adds a line of JSON for each step
    steps: int  # the script ends after this one, with a checkpoint called END
    stop: int | None = None  # the script ends after this one, with a checkpoint to resume from

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Step:
    """The record of one step of a rehearsal.

    Numbers are exact hexadecimal text, such as "0x1.8p+1".
    """

    number: int
    metrics: Mapping[str, str]
    # digest of the batches of `saver.remaining` since the previous step; None without any
    batches: str | None


class Recorder:
    """The part of a rehearsal in the script's process.

    The recorder records batches and steps, and ends the script.
    """

    def __init__(self, rehearsal: Rehearsal) -> None:
        self.directory = rehearsal.directory
        self._rehearsal = rehearsal
        self._batches: Any = None
        with suppress(NameTakenError):  # an empty file: a saver was made, and no step recorded
            _store_of(Path(rehearsal.record)).write(
                Path(rehearsal.record).name, b"", create_only=True
            )

    def watch_batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches, and add their contents to the digest of the step."""
        for batch in batches:
            self._batches = self._batches or xxhash.xxh3_128()
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
        """Record the step; after the last one save, and end the process (SystemExit).

        On every rank.
        """
        if is_main:
            digest = None if self._batches is None else self._batches.hexdigest()
            exact = {name: float(value).hex() for name, value in metrics.items()}
            record, line = (
                Path(self._rehearsal.record),
                json.dumps(asdict(Step(number, exact, digest))) + "\n",
            )
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
    """Return the recorder of this process if it is part of a rehearsal.

    Raises ConfigError if the variable is invalid.
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
    """Open the folder of the record, whose files need not survive a crash."""
    return LocalStore(record.parent, syncs=False)


def _digest_value(digest: Any, value: Any) -> None:
    """Add the contents of a batch to `digest`.

    Tensors and arrays, also inside mappings and sequences, are added by bytes; strings and numbers
    by value; other objects by class.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            digest.update(repr(key).encode())
            _digest_value(digest, item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _digest_value(digest, item)
    elif hasattr(value, "detach"):
        import torch  # not above: the command that reads the record does not need it

        local = value.to_local() if hasattr(value, "to_local") else value
        digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
        digest.update(local.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    elif hasattr(value, "tobytes"):
        digest.update(value.tobytes())
    else:
        digest.update(
            (
                repr(value) if isinstance(value, (str, bytes, int, float)) else type(value).__name__
            ).encode()
        )
