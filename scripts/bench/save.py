"""A full save until every byte is on the disk.

Files that a saver does not sync are synced within the measured time.
"""

import shutil
from functools import partial
from pathlib import Path

from scripts.bench import limits
from scripts.bench.common import Row, Setting, Way, bytes_of, in_turns, seconds, sync_tree, timed
from scripts.bench.models import Subject, make_subject
from scripts.bench.savers import Saver, installed_savers

TITLE = "save until it is durable"
LIMIT = limits.WRITE


def measure(setting: Setting, size_bytes: int) -> list[Row]:
    """Measure each way to save: until it is durable, and until it returned."""
    subject = make_subject(size_bytes)
    target = setting.folder / "target"
    savers = installed_savers()
    ways: dict[str, Way] = {
        LIMIT: partial(_limit, target, subject.size_bytes),
        limits.COPY: partial(timed, limits.make_copy(subject.state)),
    }
    for name, saver in savers.items():
        ways[name] = partial(_save, saver, subject, target)
    rows = in_turns(ways, setting)
    for row in rows:
        way = row["way"]
        row["tensor_bytes"] = subject.size_bytes
        row["syncs"] = way not in savers or savers[way].syncs
    return rows


def _limit(target: Path, size_bytes: int) -> Row:
    try:
        return timed(lambda: limits.write(target, size_bytes))
    finally:
        target.unlink()


def _save(saver: Saver, subject: Subject, target: Path) -> Row:
    try:
        returned = seconds(lambda: saver(subject, target))
        synced = 0.0 if saver.syncs else seconds(lambda: sync_tree(target))
        return {
            "seconds": returned + synced,
            "return_seconds": returned,
            "disk_bytes": bytes_of(target),
        }
    finally:
        shutil.rmtree(target, ignore_errors=True)
