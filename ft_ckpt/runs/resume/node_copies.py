"""Copies of rank 0's checkpoint on the nodes whose ranks do not see it.

Rank 0 reads the files and broadcasts them. Such a node needs the room of the checkpoint in its
temporary folder until the resume ends. Its ranks share one copy.
"""

import uuid
from contextlib import ExitStack, closing
from dataclasses import replace

import torch
from torch import Tensor

from ft_ckpt.checkpoint import OpenCheckpoint, open_checkpoint
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME
from ft_ckpt.errors import CorruptError, RankError, listing
from ft_ckpt.ranks import Outcome, Ranks
from ft_ckpt.ranks.moving import wire_device
from ft_ckpt.runs.resume.opening import RankView, ResumePoint, open_resume_point
from ft_ckpt.storage import Store, read_range
from ft_ckpt.storage.io import LocalWriting
from ft_ckpt.storage.local import LocalStore, temporary_store
from ft_ckpt.storage.places import Place

_BUFFER_BYTES = 32 << 20  # broadcast at once
_PREFIX = "ft_ckpt-node-"
_CHECKPOINT = "checkpoint"  # the copy, in the temporary folder


def copy_to_nodes(view: RankView, ranks: Ranks, stack: ExitStack) -> ResumePoint:
    """Copy rank 0's open checkpoint to the nodes whose ranks do not see it.

    Collective: call it on every rank. Returns the checkpoint that this rank reads, open until
    `stack` closes; a copy is deleted then. The copy takes 32 MiB of memory. Raises NoSpaceError if
    a temporary folder has too little space for the copy, RankError if rank 0 cannot read the
    checkpoint, CorruptError if a file was damaged on its way, and on all ranks the error of one.
    """
    if not view.far_ranks:
        assert view.resume_point is not None, "every rank sees it"
        return view.resume_point
    folder = _send_checkpoint(view, ranks, stack)
    resume_point = view.resume_point
    with ranks.deferring_error() as opening:
        if folder is not None:
            resume_point = _open_received(folder, view, stack)
    ranks.agree("opening the copies of the checkpoint of resume()", error=opening.error)
    assert resume_point is not None, "every rank sees it, or has a copy"
    return replace(resume_point, far_ranks=view.far_ranks)


def _send_checkpoint(view: RankView, ranks: Ranks, stack: ExitStack) -> LocalStore | None:
    """Send the checkpoint, and return the folder of this node's copy on the ranks that need it.

    Collective: call it on every rank.
    """
    needs_copy = view.resume_point is None
    checkpoint = None
    if ranks.is_main and view.resume_point is not None:
        checkpoint = view.resume_point.checkpoint
    facts: dict[str, object] = {}
    measuring = Outcome()
    with measuring.deferring_error():
        if checkpoint is not None:
            facts = _facts_of(checkpoint)
    agreed = ranks.agree("sending the checkpoint of resume()", facts, measuring.error).result
    mark, sizes = agreed["mark"], agreed["sizes"]
    new_folder: LocalStore | None = None
    making_folders = Outcome()
    with making_folders.deferring_error():
        if needs_copy:
            new_folder = _make_folder(mark, stack)
    ranks.agree("making folders for the checkpoint of resume()", error=making_folders.error)
    folder = None if new_folder is None else _first_marked(new_folder, mark)
    writings: dict[str, LocalWriting] = {}
    making_room = Outcome()
    with making_room.deferring_error():
        if folder is not None and folder == new_folder:
            writings = _allocate(folder, sizes)
    ranks.agree("making room for the checkpoint of resume()", error=making_room.error)
    buffer = torch.empty(_BUFFER_BYTES + 1, dtype=torch.uint8, device=wire_device())
    copying = Outcome()
    with copying.deferring_error():
        _broadcast_files(checkpoint, sizes, writings, buffer)
    ranks.agree("copying the checkpoint of resume()", error=copying.error)
    return None if folder is None else folder.within(_CHECKPOINT)


def _open_received(folder: LocalStore, view: RankView, stack: ExitStack) -> ResumePoint:
    """Open the copy of rank 0's checkpoint that this node has received.

    Raises CorruptError for a damaged copy.
    """
    # The rank that made the folder may delete it before the other ranks of the node close theirs.
    received = stack.enter_context(open_checkpoint(Place(folder), is_private=True))
    problems = received.find_problems(view.deep)
    if problems:
        raise CorruptError(
            f"{view.place}: damaged on the way to this node: {listing(problems)}; resume again"
        )
    return open_resume_point(replace(received, place=view.place), stack)


def _facts_of(checkpoint: OpenCheckpoint) -> dict[str, object]:
    """Return the size of each file, and a mark in the folder of this rank.

    By the mark, the ranks of a node recognize a folder that they share.
    """
    sizes = {}
    for name in (MANIFEST_NAME, *(record.path for record in checkpoint.manifest.files)):
        with closing(checkpoint.store.open(name)) as file:
            sizes[name] = file.size_bytes
    return {"mark": uuid.uuid4().hex, "sizes": sizes}


def _make_folder(mark: str, stack: ExitStack) -> LocalStore:
    folder = stack.enter_context(temporary_store(prefix=_PREFIX))
    folder.write(mark, b"")
    return replace(folder, syncs=False, direct_bytes=None)  # read once, from the page cache


def _first_marked(folder: LocalStore, mark: str) -> LocalStore:
    """Return the folder that the ranks of this node share: the first with the mark of this rank."""
    parent = folder.folder.parent
    marked = sorted(path.parent for path in parent.glob(f"{_PREFIX}*/{mark}"))
    return replace(folder, folder=marked[0])


def _allocate(folder: LocalStore, sizes: dict[str, int]) -> dict[str, LocalWriting]:
    return {
        name: folder.create(f"{_CHECKPOINT}/{name}", size_bytes)
        for name, size_bytes in sizes.items()
    }


def _broadcast_files(
    checkpoint: OpenCheckpoint | None,
    sizes: dict[str, int],
    writings: dict[str, LocalWriting],
    buffer: Tensor,
) -> None:
    """Send the files of rank 0's checkpoint to all ranks; a rank with `writings` writes them.

    The last byte of each broadcast tells whether rank 0 could read, so that no rank waits for bytes
    that do not come.
    """
    import torch.distributed as dist

    writing = Outcome()
    for name, size_bytes in sizes.items():
        for start in range(0, size_bytes, _BUFFER_BYTES):
            count = min(_BUFFER_BYTES, size_bytes - start)
            reading = Outcome()
            if checkpoint is not None:
                with reading.deferring_error():
                    _read_into(buffer, checkpoint.store, name, start, count)
                buffer[count] = int(reading.error is not None)
            dist.broadcast(buffer[: count + 1], src=0)
            reading.raise_error()
            if buffer[count].item():
                raise RankError("rank 0 could not read the checkpoint; its own error says why")
            if name in writings and writing.error is None:
                with writing.deferring_error():
                    writings[name].write(start, buffer[:count].cpu().numpy().data)
    writing.raise_error()  # last, because the broadcasts needed this rank
    for file in writings.values():
        file.finish()


def _read_into(buffer: Tensor, store: Store, name: str, start: int, count: int) -> None:
    with closing(store.open(name)) as file:
        content = read_range(file, start, count)
    buffer[:count].copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
