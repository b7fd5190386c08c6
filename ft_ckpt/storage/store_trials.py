"""What an object store can do, and how fast any store is: told by trying it under hidden names there."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass

from ft_ckpt.errors import CheckpointError, CorruptError, NameTakenError
from ft_ckpt.storage.buffers import BLOCK_BYTES, new_block
from ft_ckpt.storage.folder_trials import Ability
from ft_ckpt.storage.local_store import LocalStore
from ft_ckpt.storage.owners import new_owner
from ft_ckpt.storage.placing import PREFIX
from ft_ckpt.storage.read_ahead import ByteRun, read_ahead
from ft_ckpt.storage.store import Store

_MULTIPART_BYTES = 20 << 20  # more than one part of an upload
_SMALL_FILES, _SMALL_BYTES, _LOOKS = 20, 4096, 10


@dataclass(frozen=True)
class StoreSpeed:
    """How fast a store is, for one process."""

    write_bytes_per_second: float
    read_bytes_per_second: float
    small_files_per_second: float
    seconds_per_look: float


def try_store(store: Store) -> tuple[Ability, ...]:
    """Try what saves rely on, under a new hidden name in `store`, which is empty again afterwards.

    Raises TargetError or UnreadableError where nothing can be written or read there.
    """
    with _hidden_room(store) as room:
        room.write("object", b"0123456789")
        return tuple(_tried_there(name, trial, room) for name, trial in STORE_TRIALS.items())


def measure_speed(store: Store, size_bytes: int) -> StoreSpeed:
    """Write and read an object of `size_bytes` and some small ones under a new hidden name. Raises what these do."""
    with _hidden_room(store) as room:
        writing = _seconds_of(lambda: _write_large(room, size_bytes))
        reading = _seconds_of(lambda: _read_large(room))
        small = _seconds_of(lambda: _write_small(room))
        looks = statistics.median(_seconds_of(lambda: room.stat("small-0")) for _ in range(_LOOKS))
    return StoreSpeed(size_bytes / writing, size_bytes / reading, _SMALL_FILES / small, looks)


@contextmanager
def _hidden_room(store: Store) -> Iterator[Store]:
    """A new hidden folder in `store`, which is gone after the block."""
    name = f"{PREFIX}doctor-{new_owner()}"
    room = store.within(name)
    try:
        yield room
    finally:
        if isinstance(room, LocalStore):
            room.delete_all()  # the folder too, of which nothing may have been written
        else:
            room.delete([each.name for each in room.list()])


def _tried_there(name: str, trial: Callable[[Store], str], room: Store) -> Ability:
    try:
        wrong = trial(room)
    except CheckpointError as error:
        return Ability(name, works=False, detail=str(error))
    return Ability(name, works=not wrong, detail=wrong)


def _create_once(room: Store) -> str:
    room.write("once", b"first", create_only=True)
    with suppress(NameTakenError):
        room.write("once", b"second", create_only=True)
        return "the condition is ignored: a second writer replaced the first"
    return "" if room.read("once") == b"first" else "refused, and replaced nevertheless"


def _refuse_changed(room: Store) -> str:
    room.write("changed", b"before")
    with closing(room.open("changed")) as opened:
        room.write("changed", b"behind")
        content = bytearray(6)
        with suppress(CorruptError):
            opened.read_into(memoryview(content))
    return "an object that was written over is read on" if content == b"behind" else ""


def _read_ranges(room: Store) -> str:
    return "" if room.read("object", 3, 7) == b"3456" else "other bytes came"


def _write_in_parts(room: Store) -> str:
    _write_large(room, _MULTIPART_BYTES)
    found = room.stat("large")
    return "" if found is not None and found.size_bytes == _MULTIPART_BYTES else "not whole afterwards"


def _copy_there(room: Store) -> str:
    if not room.copy("object", "copied"):
        return "refused"
    return "" if room.read("copied") == b"0123456789" else "other bytes came"


def _list_written(room: Store) -> str:
    room.write("below/one", b"1")
    return "" if "below/one" in {each.name for each in room.list()} else "what was written is not listed"


def _see_clock(room: Store) -> str:
    found = room.stat("object")
    late = 0.0 if found is None else abs(found.modified - time.time())
    return "" if late < 60 else f"{late:.0f} s apart from this machine's"


STORE_TRIALS: dict[str, Callable[[Store], str]] = {
    "creating what is new only": _create_once,
    "noticing what was written over": _refuse_changed,
    "reading ranges": _read_ranges,
    "writing in parts": _write_in_parts,
    "copies by the service": _copy_there,
    "listing at once": _list_written,
    "the clock": _see_clock,
}


def _write_large(room: Store, size_bytes: int) -> None:
    block, writing = new_block(), room.create("large", size_bytes)
    try:
        with memoryview(block) as content:
            for at in range(0, size_bytes, BLOCK_BYTES):
                with content[: min(BLOCK_BYTES, size_bytes - at)] as part:
                    writing.write(at, part)
        writing.finish()
    except BaseException:
        writing.abandon()
        raise


def _write_small(room: Store) -> None:
    for at in range(_SMALL_FILES):
        room.write(f"small-{at}", b"1" * _SMALL_BYTES)


def _read_large(room: Store) -> None:
    with closing(room.open("large")) as file:
        for _ in read_ahead([ByteRun("large", file, 0, file.size_bytes)], 4, direct="on"):
            pass


def _seconds_of(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return max(1e-9, time.perf_counter() - begun)
