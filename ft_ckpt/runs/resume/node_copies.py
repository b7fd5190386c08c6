"""Copies rank 0's checkpoint to the nodes whose ranks do not see it.

Rank 0 reads the files and broadcasts them. The ranks of a node share one copy in the temporary
folder of the node, which needs room for the whole checkpoint until the resume ends.

Ranks agree after each step: they exchange their outcomes, and an error of one rank is raised on all
of them. `deferring_error` keeps the error of a block until the ranks agree.
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
from ft_ckpt.runs.resume.opening import RankAccess, ResumePoint, open_resume_point
from ft_ckpt.storage import Store, read_range
from ft_ckpt.storage.io import LocalWriting
from ft_ckpt.storage.local import LocalStore, temporary_store
from ft_ckpt.storage.places import Place

_BUFFER_BYTES = 32 << 20  # size of one broadcast
_FOLDER_PREFIX = "ft_ckpt-node-"
_CHECKPOINT = "checkpoint"  # subfolder of the temporary folder that holds the copy


def copy_to_nodes(access: RankAccess, ranks: Ranks, stack: ExitStack) -> ResumePoint:
    """Copy rank 0's open checkpoint to the nodes whose ranks do not see it.

    Collective: call it on every rank. Returns the checkpoint that this rank reads. `stack` closes
    it, and deletes a copy. Copying takes 32 MiB of memory on each rank.

    Errors of one rank are raised on all: NoSpaceError if a temporary folder has too little space
    for the copy, RankError if rank 0 cannot read the checkpoint, CorruptError if a file was damaged
    on its way.
    """
    if not access.ranks_without_access:
        assert access.resume_point is not None, "every rank sees it"
        return access.resume_point
    folder = _send_checkpoint(access, ranks, stack)
    resume_point = access.resume_point
    with ranks.deferring_error() as opening:
        if folder is not None:
            resume_point = _open_received(folder, access, stack)
    ranks.agree("opening the copies of the checkpoint of resume()", error=opening.error)
    assert resume_point is not None, "every rank sees it, or has a copy"
    return replace(resume_point, ranks_without_access=access.ranks_without_access)


def _send_checkpoint(access: RankAccess, ranks: Ranks, stack: ExitStack) -> LocalStore | None:
    """Send the checkpoint from rank 0 to the ranks that do not see it.

    Collective: call it on every rank. Returns the folder of the copy on the ranks that need it,
    None on the others.
    """
    needs_copy = access.resume_point is None
    checkpoint = None
    if ranks.is_main and access.resume_point is not None:
        checkpoint = access.resume_point.checkpoint
    header: dict[str, object] = {}
    measuring = Outcome()
    with measuring.deferring_error():
        if checkpoint is not None:
            header = {"token": uuid.uuid4().hex, "sizes": _file_sizes(checkpoint)}

    agreed = ranks.agree("sending the checkpoint of resume()", header, measuring.error)
    token: str = agreed.result["token"]
    sizes: dict[str, int] = agreed.result["sizes"]

    # Each rank without the checkpoint makes a folder. The ranks of a node then see the folders of
    # each other, and all of them take the first one.
    new_folder: LocalStore | None = None
    making_folders = Outcome()
    with making_folders.deferring_error():
        if needs_copy:
            new_folder = _make_folder(token, stack)

    ranks.agree("making folders for the checkpoint of resume()", error=making_folders.error)
    folder = None if new_folder is None else _first_with_token(new_folder, token)
    writings: dict[str, LocalWriting] = {}
    making_room = Outcome()
    with making_room.deferring_error():
        # The rank that made the first folder writes the copy of its node.
        if folder is not None and folder == new_folder:
            writings = _allocate(folder, sizes)

    ranks.agree("making room for the checkpoint of resume()", error=making_room.error)
    buffer = torch.empty(_BUFFER_BYTES + 1, dtype=torch.uint8, device=wire_device())
    copying = Outcome()
    with copying.deferring_error():
        _broadcast_files(checkpoint, sizes, writings, buffer)
    ranks.agree("copying the checkpoint of resume()", error=copying.error)
    return None if folder is None else folder.within(_CHECKPOINT)


def _file_sizes(checkpoint: OpenCheckpoint) -> dict[str, int]:
    """Return the size of each file of the checkpoint in bytes, by its path."""
    sizes: dict[str, int] = {}
    for name in (MANIFEST_NAME, *(record.path for record in checkpoint.manifest.files)):
        with closing(checkpoint.store.open(name)) as file:
            sizes[name] = file.size_bytes
    return sizes


def _make_folder(token: str, stack: ExitStack) -> LocalStore:
    """Make a temporary folder that `stack` deletes, with an empty file named `token` in it."""
    folder = stack.enter_context(temporary_store(prefix=_FOLDER_PREFIX))
    folder.write(token, b"")
    # The copy is read once, from the page cache, so it need not reach the disk.
    return replace(folder, syncs=False, direct_bytes=None)


def _first_with_token(folder: LocalStore, token: str) -> LocalStore:
    """Return the first folder next to `folder` that was made for this resume.

    It is the same on all ranks of a node.
    """
    parent = folder.folder.parent
    made_now = sorted(path.parent for path in parent.glob(f"{_FOLDER_PREFIX}*/{token}"))
    return replace(folder, folder=made_now[0])


def _allocate(folder: LocalStore, sizes: dict[str, int]) -> dict[str, LocalWriting]:
    """Create the files of the copy, with room for their bytes."""
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
    """Broadcast the files of rank 0's checkpoint to all ranks.

    A rank with `writings` writes them, the others drop what they receive. `buffer` holds one
    broadcast. Its last byte says whether rank 0 could read:

        | up to 32 MiB of a file | 0: read, 1: not read |

    So all ranks stop together if rank 0 cannot read.
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

    # Not earlier: the broadcasts need every rank, also one that cannot write.
    writing.raise_error()
    for file in writings.values():
        file.finish()


def _read_into(buffer: Tensor, store: Store, name: str, start: int, count: int) -> None:
    with closing(store.open(name)) as file:
        content = read_range(file, start, count)
    buffer[:count].copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))


def _open_received(folder: LocalStore, access: RankAccess, stack: ExitStack) -> ResumePoint:
    """Open the copy of rank 0's checkpoint that this node has received.

    Raises CorruptError for a damaged copy.
    """
    # `is_private` because the rank that made the folder may delete it while other ranks of the node
    # still have it open.
    received = stack.enter_context(open_checkpoint(Place(folder), is_private=True))
    problems = received.find_problems(access.deep)
    if problems:
        raise CorruptError(
            f"{access.place}: damaged on the way to this node: {listing(problems)}; resume again"
        )
    return open_resume_point(replace(received, place=access.place), stack)
