"""A trial on a file system: do byte ranges arrive that all ranks write into one file at once?

The trial writes by the code of saves.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from ft_ckpt.errors import reason_of
from ft_ckpt.ranks import Ranks, Values, try_action
from ft_ckpt.storage.io import ALIGNMENT, Region, Writer, WriteTuning, region_of
from ft_ckpt.storage.local import TRIAL, LocalStore, temporary_store

_FILES = 4  # written one after the other; every second one past the page cache
# whole disk blocks, between two blocks that neighbours write into as well
_PIECE_BYTES = 3 * ALIGNMENT + 1500
_PIECES, _MIN_PIECES_OF_RANK = 128, 4
_TUNING = WriteTuning(block_bytes=1 << 20)


def try_ranges(folder: Path, ranks: Ranks) -> str:
    """Return "" if pieces that all ranks write arrive on all ranks, or what differs. Collective.

    The pieces of the ranks follow each other in turn, in files in a hidden folder of `folder`.
    Raises the error of rank 0 on all ranks if it cannot make the files.
    """
    with ExitStack() as stack:

        def make_files() -> str | None:
            if not ranks.is_main:
                return None
            store = stack.enter_context(temporary_store(folder, TRIAL))
            # A client that opens a file before it has its size may fill up its pages with zeros.
            for number in range(_FILES):
                store.allocate(_name(number), _size_of(ranks.size))
            return str(store.folder)

        made, error = try_action(make_files)
        trial_folder = ranks.agree("the trial of byte ranges", {"folder": made}, error).result
        store = LocalStore(Path(trial_folder["folder"]), syncs=False)
        for number in range(_FILES):  # of which all ranks begin each at the same time
            failure = _try_on_all(partial(_write_pieces, store, number, ranks), ranks)
            if failure:
                return failure
        return _try_on_all(partial(_compare_files, store, ranks), ranks)


def _try_on_all(action: Callable[[], str], ranks: Ranks) -> str:
    """The problem that `action` returns on the first rank that has one, "" for none."""
    problem, error = ranks.attempt(action)
    value = {"problem": problem}
    agreed = ranks.agree("a trial of byte ranges", value, error, decide=_describe_problems)
    return str(agreed.result)


def _name(number: int) -> str:
    return f"file-{number}"


def _pieces_of(ranks: int) -> int:
    """The number of pieces that each of `ranks` ranks writes into a file."""
    return max(_MIN_PIECES_OF_RANK, _PIECES // ranks)


def _size_of(ranks: int) -> int:
    return _pieces_of(ranks) * ranks * _PIECE_BYTES


def _content(number: int, ranks: int) -> bytes:
    """The whole file, equal on all ranks."""
    return hashlib.shake_128(f"{number}".encode()).digest(_size_of(ranks))


def _write_pieces(store: LocalStore, number: int, ranks: Ranks) -> str:
    """Write the pieces of this rank, as a save does; the error of the system, if there is one."""
    content = _content(number, ranks.size)
    tuned = replace(store, direct_bytes=None if number % 2 else 0)
    try:
        writing = tuned.share(_name(number), len(content))
        with Writer(_TUNING) as writer, writer.fill(writing) as file:
            for region in _own_regions(content, ranks):
                file.put_region(region)
            file.finish()
    except OSError as error:
        return reason_of(error)
    return ""


def _own_regions(content: bytes, ranks: Ranks) -> Iterator[Region]:
    """The pieces of this rank.

    Odd ranks begin in the middle of the file: of two neighbours each is the first to write into one
    half.
    """
    pieces = _pieces_of(ranks.size)
    first = pieces // 2 if ranks.rank % 2 else 0
    for turn in range(first, first + pieces):
        start = (turn % pieces * ranks.size + ranks.rank) * _PIECE_BYTES
        yield region_of(start, content[start : start + _PIECE_BYTES])


def _compare_files(store: LocalStore, ranks: Ranks) -> str:
    """The first difference of a file from what all ranks have written, "" for none."""
    for number in range(_FILES):
        expected = _content(number, ranks.size)
        try:
            stored = store.read(_name(number))
        except OSError as error:
            return reason_of(error)
        for piece, start in enumerate(range(0, len(expected), _PIECE_BYTES)):
            end = start + _PIECE_BYTES
            if stored[start:end] != expected[start:end]:
                writer = piece % ranks.size
                return f"bytes {start:,} to {end:,} of a file are not those of rank {writer}"
    return ""


def _describe_problems(values: Values) -> str:
    """On rank 0: the problem of the first rank that has one."""
    for rank, value in enumerate(values):
        if value["problem"]:
            return f"rank {rank}: {value['problem']}"
    return ""
