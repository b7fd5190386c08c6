"""A full save of a run in which 99 % of the weights are frozen, at its second checkpoint."""

import shutil
from functools import partial
from itertools import count
from pathlib import Path

import torch

from ft_ckpt import CheckpointSaver
from scripts.bench.common import Row, Setting, bytes_of, files, in_turns, seconds, sync_tree
from scripts.bench.models import Subject, make_subject
from scripts.bench.savers import SAVERS

TITLE = "a second full save with 99 % frozen"
SHARE = 0.01


def measure(setting: Setting, size_bytes: int) -> list[Row]:
    """A row for ours, in the foreground and in the background, and for `save_pretrained`, which
    writes everything.

    Seconds until the call returned, their ratio to the first save, which writes everything, and new
    bytes on disk.
    """
    subject = make_subject(size_bytes)
    trainable = freeze(subject)
    with CheckpointSaver(directory=setting.folder / "run", reuse_frozen="on") as saver:
        steps = count()
        step = next(steps)
        first = seconds(lambda: saver.save(subject.model, step=step))
        ways = {
            "ours": partial(_ours, saver, subject, steps, first, background=False),
            "ours, in the background": partial(
                _ours, saver, subject, steps, first, background=True
            ),
            "save_pretrained": partial(_peer, subject, setting.folder / "peer"),
        }
        rows = in_turns(ways, setting)
    return [
        row | {"tensor_bytes": subject.size_bytes, "trainable_bytes": trainable} for row in rows
    ]


def freeze(subject: Subject) -> int:
    """Freeze all but the smallest tensors, up to a hundredth of the bytes; return the bytes of
    these.
    """
    max_bytes = SHARE * subject.size_bytes
    total = 0
    trainable = 0
    for parameter in sorted(subject.model.parameters(), key=lambda p: p.nbytes):
        total += parameter.nbytes
        parameter.requires_grad_(total <= max_bytes)
        if parameter.requires_grad:
            trainable = total
    return trainable


def _ours(
    saver: CheckpointSaver, subject: Subject, steps: "count[int]", first: float, background: bool
) -> Row:
    with torch.no_grad():
        for parameter in subject.model.parameters():
            if parameter.requires_grad:
                parameter.add_(1e-3)
    before = {path.stat().st_ino for path in files(Path(str(saver.directory)))}
    step = next(steps)
    took = seconds(lambda: saver.save(subject.model, step=step, background=background))
    saver.wait()
    folder = Path(str(saver.directory)) / f"checkpoint-{step}"
    new = sum(path.stat().st_size for path in files(folder) if path.stat().st_ino not in before)
    return {
        "seconds": took,
        "of_first_save": took / first,
        "new_bytes": new,
        "disk_bytes": bytes_of(folder),
    }


def _peer(subject: Subject, target: Path) -> Row:
    took = seconds(lambda: (SAVERS["save_pretrained"](subject, target), sync_tree(target)))
    written = bytes_of(target)
    shutil.rmtree(target)
    return {"seconds": took, "new_bytes": written, "disk_bytes": written}
