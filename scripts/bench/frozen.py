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
    """Measure ft_ckpt, in the foreground and in the background, and `save_pretrained`.

    The figures are seconds until the call returned, their ratio to the first save, and new bytes on
    disk. The first save writes everything, and so does `save_pretrained`.
    """
    subject = make_subject(size_bytes)
    trainable = freeze(subject)
    with CheckpointSaver(directory=setting.folder / "run", reuse_frozen="on") as saver:
        steps = count()
        step = next(steps)
        first = seconds(lambda: saver.save(subject.model, step=step))
        save = partial(_ours, saver, subject, steps, first)
        ways = {
            "ours": partial(save, background=False),
            "ours, in the background": partial(save, background=True),
            "save_pretrained": partial(_peer, subject, setting.folder / "peer"),
        }
        rows = in_turns(ways, setting)
    sizes = {"tensor_bytes": subject.size_bytes, "trainable_bytes": trainable}
    return [row | sizes for row in rows]


def freeze(subject: Subject) -> int:
    """Freeze all but the smallest tensors, a hundredth of the bytes; return the bytes of these."""
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
    duration = seconds(lambda: saver.save(subject.model, step=step, background=background))
    saver.wait()
    folder = Path(str(saver.directory)) / f"checkpoint-{step}"
    statuses = [path.stat() for path in files(folder)]
    return {
        "seconds": duration,
        "of_first_save": duration / first,
        "new_bytes": sum(status.st_size for status in statuses if status.st_ino not in before),
        "disk_bytes": bytes_of(folder),
    }


def _peer(subject: Subject, target: Path) -> Row:
    def save() -> None:
        SAVERS["save_pretrained"](subject, target)
        sync_tree(target)

    duration = seconds(save)
    written_bytes = bytes_of(target)
    shutil.rmtree(target)
    return {"seconds": duration, "new_bytes": written_bytes, "disk_bytes": written_bytes}
