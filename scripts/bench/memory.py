"""Peak memory of a process during a save, above the model that it has already.

Each way of ft_ckpt has a process of its own, because it may keep memory for its next save; the
peers share one.
"""

from scripts.bench.common import (
    Row,
    Setting,
    as_child,
    bytes_of,
    describe,
    in_child,
    peak_bytes,
    scratch,
)
from scripts.bench.models import Subject, make_subject
from scripts.bench.savers import SAVERS, Saver, installed_savers

TITLE = "memory at its peak during a save, above the state dict"
WARM_BYTES = 5_000_000  # of a first save: what libraries load and start is not part of a save


def measure(setting: Setting, size_bytes: int) -> list[Row]:
    """Measure one save of each way, because memory does not vary as time does."""
    names = list(installed_savers())
    ours = [[name] for name in names if name.startswith("ours")]
    peers = [name for name in names if not name.startswith("ours")]
    rows = []
    for group in (*ours, peers):
        rows += in_child("memory", setting, size_bytes, group)
    return rows


def measure_in_child(setting: Setting, size_bytes: int, names: list[str]) -> list[Row]:
    """Measure one way after the other, in the child."""
    subject, small = make_subject(size_bytes), make_subject(WARM_BYTES)
    rows = [_save(setting, SAVERS[name], subject, small) for name in names]
    return [row | {"tensor_bytes": subject.size_bytes} for row in rows]


def _save(setting: Setting, saver: Saver, subject: Subject, small: Subject) -> Row:
    try:
        with scratch(setting.folder) as folder:
            saver(small, folder / "warm")
            target = folder / "target"
            peak = peak_bytes(lambda: saver(subject, target))
            return {"way": saver.name, "peak_bytes": peak, "disk_bytes": bytes_of(target)}
    except Exception as error:
        if saver.name.startswith("ours"):
            raise
        return {"way": saver.name, "error": describe(error)}


if __name__ == "__main__":
    as_child("memory", measure_in_child)
