"""A checkpoint that not all ranks see, as on nodes without a shared disk: rank 0 reads it for those that do not.

What a rank asks for, and the bytes that answer it, go through the store of the process group: no collective, so every
rank reads what it holds when it comes to it, whatever its wrapper, a few MB at a time.
"""

import ctypes
import json
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ft_ckpt.checkpoint.manifest import MANIFEST_NAME, manifest_from_json, manifest_to_json
from ft_ckpt.checkpoint.open_checkpoint import OpenCheckpoint, open_checkpoint
from ft_ckpt.distributed.agreement import rank_numbers
from ft_ckpt.distributed.ranks import Ranks, current_ranks, try_action
from ft_ckpt.distributed.threads import beside_thread
from ft_ckpt.errors import CheckpointError, RankError, damaged_input
from ft_ckpt.formats.dtypes import dtype_of
from ft_ckpt.formats.layout import ITEM_BYTES, Spec, TensorFile
from ft_ckpt.storage.local_store import LocalStore
from ft_ckpt.storage.place import Place
from ft_ckpt.training.accelerate_folder import is_foreign, open_accelerate_folder
from ft_ckpt.training.exchange import decide_together, hear_leader
from ft_ckpt.training.starting import accelerate_folder_at
from ft_ckpt.training.state_files import ResumePoint, StoredTensors, open_resume_point

_LANE = "serving"
_DONE, _FAILED = b"+", b"-"  # the last byte of an answer
_PIECE_BYTES = 4 << 20  # of one answer: torch's store ends at 8 MiB; rank 0's host keeps it until it is taken
_AHEAD = 2  # answers of one rank that may wait there
_WAIT = timedelta(seconds=0.5)  # between looks at whether the other side is still there

Read = Callable[[str, str, int, int], Tensor]  # folder of a part, tensor, flat elements [start, stop) -> on the host


@dataclass(frozen=True)
class CheckpointFacts:
    """By what rank 0 tells the others which checkpoint it has chosen."""

    path: str
    identity: str
    place: tuple[int, ...]  # what is the same of its manifest on all machines that share its disk, and not of a copy


@dataclass(frozen=True)
class _Sight:
    sees: bool
    shares: bool  # the comparison of its large files with their digests


@dataclass(frozen=True)
class _Views:
    far: str  # ranks that do not see it, in words; "" for none
    sharers: tuple[tuple[int, int], ...]  # runs of ranks, the first and the last of each: few, however many ranks


@dataclass(frozen=True)
class _Sent:
    """What rank 0 sends of a checkpoint to those who do not see it, and what they call it when they ask for tensors."""

    serving_id: str = ""
    manifest: str = ""
    document: Mapping[str, Any] = field(default_factory=dict)


def checkpoint_facts(held: OpenCheckpoint) -> CheckpointFacts:
    """What tells the checkpoint from all others."""
    place = () if is_foreign(held.manifest) else _manifest_place(held)  # else its identity tells it
    return CheckpointFacts(str(held.location), held.identity, place)


def open_to_all(
    point: ResumePoint | None,
    found: CheckpointFacts,
    place_called: Callable[[str], Place],
    ranks: Ranks,
    stack: ExitStack,
    deep: bool,
    late: bool = False,
) -> ResumePoint:
    """The checkpoint that rank 0 has open as `point`, by its facts `found`, on every rank until the stack ends.

    A rank sees it that finds the same files at the same path or URL, or a copy that is whole (`deep`: by its digests);
    `place_called` opens these. For one that does not, rank 0 reads, in a thread. `late`: digests are still to be
    compared, a task that ranks which see the same files share. Collective.
    """
    place = place_called(found.path)
    here, _ = try_action(lambda: point or _open_copy(found, place, stack, deep, late))
    sight, kinds = _Sight(here is not None, here is not None and bool(here.tensors.proofs)), (_Sight, _Views)
    views, _ = decide_together(ranks, "opening the checkpoint of resume()", sight, _who_sees_it, kinds)
    sharers = [rank for first, last in views.sharers for rank in range(first, last + 1)]
    if here is not None and ranks.rank in sharers:
        here.tensors.take_share(sharers.index(ranks.rank), len(sharers))
    far = views.far
    if not far:
        return cast("ResumePoint", here)
    mine, error = try_action(lambda: _Sent() if point is None else _checkpoint_to_send(point))
    sent = hear_leader(ranks, "sending the checkpoint of resume()", _Sent, mine, error)
    if point is not None:
        again = _open_again(point, stack)  # the thread's own: open files are of one thread
        stack.enter_context(serve_reads(sent.serving_id, again.read, ranks))
    return _remote_checkpoint(found, place, sent, ranks, far) if here is None else replace(here, served=far)


def _who_sees_it(answers: Sequence[_Sight]) -> _Views:
    far = rank_numbers([rank for rank, answer in enumerate(answers) if not answer.sees])
    runs = [(shares, [*some]) for shares, some in groupby(range(len(answers)), lambda rank: answers[rank].shares)]
    return _Views(far, tuple((run[0], run[-1]) for shares, run in runs if shares))


@contextmanager
def serve_reads(word: str, read: Read, ranks: Ranks) -> Iterator[None]:
    """On rank 0: answer from a thread what other ranks ask about the checkpoint they call `word`, while this lasts.

    `read` is called in that thread.
    """
    store = current_ranks(ranks.timeout_seconds, _LANE).store
    with beside_thread("ft_ckpt-serve", partial(_answer_requests, store, word, read)):
        yield


@dataclass(eq=False)
class RemoteFile:
    """The tensors of a part that rank 0 reads for this rank; a `TensorFile`."""

    part: str  # its folder
    specs: Mapping[str, Spec]
    word: str  # that rank 0 answers to
    ranks: Ranks
    store: Any = field(init=False)

    def __post_init__(self) -> None:
        self.store = current_ranks(self.ranks.timeout_seconds, _LANE).store

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Flat elements [start, stop) of the tensor. Raises RankError when rank 0 cannot read them, or is gone."""
        spec = self.specs[name]
        item = ITEM_BYTES[spec.dtype]
        stop = spec.size_bytes // item if stop is None else stop
        found = torch.empty((stop - start) * item, dtype=torch.uint8)
        asked: deque[tuple[str, int, int]] = deque()
        step = max(1, _PIECE_BYTES // item)
        for low in range(start, stop, step):
            high = min(low + step, stop)
            key = self._send_request([self.part, name, low, high])
            asked.append((key, (low - start) * item, (high - start) * item))
            if len(asked) == _AHEAD:
                self._receive_answer(asked.popleft(), found)
        while asked:
            self._receive_answer(asked.popleft(), found)
        return found.view(dtype_of(spec.dtype))

    def close(self) -> None:
        """Nothing is open here."""

    def _send_request(self, what: list[Any]) -> str:
        number = self.store.add(_store_key(self.word, "asked"), 1)
        self.store.set(_store_key(self.word, f"ask/{number}"), json.dumps(what))
        return _store_key(self.word, f"answer/{number}")

    def _receive_answer(self, asked: tuple[str, int, int], found: Tensor) -> None:
        key, start, stop = asked
        while not _wait_for_key(self.store, key):
            self.ranks.check_peers()
        answer = self.store.get(key)
        self.store.delete_key(key)
        if len(answer) != stop - start + 1 or answer[-1:] != _DONE:
            raise RankError(f"rank 0, which reads the checkpoint for this rank: {answer[:-1].decode(errors='replace')}")
        ctypes.memmove(found.data_ptr() + start, answer, stop - start)


def _open_copy(found: CheckpointFacts, place: Place, stack: ExitStack, deep: bool, late: bool) -> ResumePoint | None:
    """The checkpoint as this rank sees it; None when it is another one, or a copy that is damaged."""
    if accelerate_folder_at(place) is not None:
        there = open_accelerate_folder(Path(found.path), stack)
        return there if checkpoint_facts(there.checkpoint) == found else None
    with ExitStack() as trial:
        here = trial.enter_context(open_checkpoint(place, compares=False))
        is_rank_0s = _manifest_place(here) == found.place
        if here.identity == found.identity and (is_rank_0s or not here.find_problems(deep)):
            point = open_resume_point(here, trial, here.late_proofs() if is_rank_0s and late else ())
            stack.push(trial.pop_all())
            return point
    return None


def _open_again(point: ResumePoint, stack: ExitStack) -> StoredTensors:
    """The tensors of `point`, in files of their own."""
    if is_foreign(point.checkpoint.manifest):
        return open_accelerate_folder(point.checkpoint.path, stack).tensors
    again = StoredTensors(point.checkpoint)
    stack.callback(again.close)
    return again


def _manifest_place(held: OpenCheckpoint) -> tuple[int, ...]:
    """See `CheckpointFacts`; nothing in a bucket, of which there is one however many machines look at it."""
    if not isinstance(held.origin, LocalStore):
        return ()
    with damaged_input(held.path):
        status = (held.path / MANIFEST_NAME).stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _checkpoint_to_send(point: ResumePoint) -> _Sent:
    return _Sent(uuid.uuid4().hex, manifest_to_json(point.checkpoint.manifest), point.document)


def _remote_checkpoint(found: CheckpointFacts, place: Place, sent: _Sent, ranks: Ranks, far: str) -> ResumePoint:
    """The checkpoint for a rank that does not see it, which has been `sent` all but the tensors: rank 0 reads these."""
    manifest = manifest_from_json(sent.manifest, found.path)
    files: dict[str, TensorFile] = {}
    for part in manifest.parts:
        specs = {tensor.name: Spec(tensor.name, tensor.shape, tensor.dtype) for tensor in part.tensors}
        files[part.path] = RemoteFile(part.path, specs, sent.serving_id, ranks)
    held = OpenCheckpoint(place.folder, place.folder, manifest, found.identity)
    return ResumePoint(held, dict(sent.document), StoredTensors(held, files.__getitem__), far)


def _answer_requests(store: Any, word: str, read: Read, done: threading.Event) -> None:
    number = 1
    while not done.is_set():
        key = _store_key(word, f"ask/{number}")
        if not _wait_for_key(store, key):
            continue
        asked = json.loads(store.get(key))
        data, error = try_action(lambda: read(*asked))  # noqa: B023 - called at once
        store.set(_store_key(word, f"answer/{number}"), _encode_failure(error) if error else _encode_answer(data))
        store.delete_key(key)
        number += 1


def _encode_answer(data: Tensor) -> bytes:
    return data.contiguous().view(-1).view(torch.uint8).numpy().tobytes() + _DONE


def _encode_failure(error: BaseException) -> bytes:
    return (str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}").encode() + _FAILED


def _wait_for_key(store: Any, key: str) -> bool:
    with suppress(RuntimeError):  # DistStoreError: time is up
        store.wait([key], _WAIT)
        return True
    return False


def _store_key(word: str, name: str) -> str:
    return f"ft_ckpt/{_LANE}/{word}/{name}"
