"""Tries whether a file system keeps all bytes that several ranks write into one file at once.

Each file of the trial is a sequence of pieces, and the ranks take turns. With three ranks, rank 0
writes pieces 0, 3, 6, ..., rank 1 writes pieces 1, 4, 7, ..., rank 2 the others. Each rank knows
the whole content in advance. After all ranks have written, each rank reads the files and compares
them. The trial writes with the same code as a save.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from ft_ckpt.errors import reason_of
from ft_ckpt.ranks import Ranks, Values, try_action
from ft_ckpt.storage.io import ALIGNMENT, Region, WriterPool, WriteTuning, region_of
from ft_ckpt.storage.local import TRIAL, LocalStore, temporary_store

# Files are written one after the other. Every second one is written with direct I/O, which bypasses
# the page cache.
_FILES = 4
# A piece covers whole disk blocks. It begins and ends inside a block, into which the rank of the
# neighbouring piece writes too.
_PIECE_BYTES = 3 * ALIGNMENT + 1500
# Pieces of a file, if no rank has fewer than the minimum.
_PIECES = 128
_MIN_PIECES_OF_RANK = 4
_TUNING = WriteTuning(block_bytes=1 << 20)


def try_ranges(folder: Path, ranks: Ranks) -> str:
    """Check that all ranks read what all ranks wrote into the same files at the same time.

    The files are in a hidden folder inside `folder`, which is deleted afterwards. Returns a text on
    the first difference, "" if there is none. Collective: call it on every rank. Raises the error
    of rank 0 on all ranks if rank 0 cannot make the files.
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

        folder_name, error = try_action(make_files)

        # Every rank gets the value of rank 0: the folder that rank 0 has made.
        value = {"folder": folder_name}
        value_of_rank_0 = ranks.agree("the trial of byte ranges", value, error).result
        store = LocalStore(Path(value_of_rank_0["folder"]), syncs=False)

        # The ranks agree after each file, so that all of them begin the next one at the same time.
        for number in range(_FILES):
            failure = _try_on_all(partial(_write_pieces, store, number, ranks), ranks)
            if failure:
                return failure

        return _try_on_all(partial(_compare_files, store, ranks), ranks)


def _try_on_all(action: Callable[[], str], ranks: Ranks) -> str:
    """Run `action` on all ranks; return the problem of the first rank that has one, else ""."""
    problem, error = ranks.attempt(action)
    value = {"problem": problem}
    agreed = ranks.agree("a trial of byte ranges", value, error, decide=_describe_problems)
    return str(agreed.result)


def _name(number: int) -> str:
    return f"file-{number}"


def _pieces_of(ranks: int) -> int:
    """Return how many pieces each of `ranks` ranks writes into a file."""
    return max(_MIN_PIECES_OF_RANK, _PIECES // ranks)


def _size_of(ranks: int) -> int:
    return _pieces_of(ranks) * ranks * _PIECE_BYTES


def _content(number: int, ranks: int) -> bytes:
    """Return the content of the whole file, which is equal on all ranks."""
    return hashlib.shake_128(f"{number}".encode()).digest(_size_of(ranks))


def _write_pieces(store: LocalStore, number: int, ranks: Ranks) -> str:
    """Write the pieces of this rank as a save does.

    Returns the error of the system as text, "" if there is none.
    """
    content = _content(number, ranks.size)
    tuned = replace(store, direct_bytes=None if number % 2 else 0)
    try:
        writing = tuned.share(_name(number), len(content))
        with WriterPool(_TUNING) as writer, writer.fill(writing) as file:
            for region in _regions_of_rank(content, ranks):
                file.put_region(region)
            file.finish()
    except OSError as error:
        return reason_of(error)
    return ""


def _regions_of_rank(content: bytes, ranks: Ranks) -> Iterator[Region]:
    """Yield the pieces of this rank.

    Odd ranks begin in the middle of the file, so that each of two neighbours is the first to write
    into one half of it.
    """
    pieces = _pieces_of(ranks.size)
    first = pieces // 2 if ranks.rank % 2 else 0
    for number in range(first, first + pieces):
        turn = number % pieces  # wraps to the beginning of the file
        start = (turn * ranks.size + ranks.rank) * _PIECE_BYTES
        yield region_of(start, content[start : start + _PIECE_BYTES])


def _compare_files(store: LocalStore, ranks: Ranks) -> str:
    """Return a text on the first difference between a file and what the ranks have written.

    Returns "" if there is none.
    """
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
    """Return the problem of the first rank that has one, else ""; called on rank 0."""
    for rank, value in enumerate(values):
        if value["problem"]:
            return f"rank {rank}: {value['problem']}"
    return ""
