"""The mark of a save to a bucket, which excludes other saves to the same folder."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ft_ckpt.checkpoint.leases.leases import (
    ExclusiveLease,
    mark_holder,
    may_live,
    read_mark,
    store_time,
)
from ft_ckpt.checkpoint.leases.marks import SAVING
from ft_ckpt.checkpoint.manifest import load_manifest
from ft_ckpt.errors import CheckpointError, NameTakenError, TargetError
from ft_ckpt.storage import Store


@dataclass(eq=False)
class SaveMark(ExclusiveLease):
    """The mark of one save in the folder `store`, from `take` until `release`."""

    name: str = SAVING
    run_id: str | None = None
    # whether all files in the folder are of this save, or of dead saves that it has replaced
    cleared: bool = False

    @property
    def content(self) -> dict[str, Any]:
        return {**super().content, "run_id": self.run_id, "cleared": self.cleared}

    def take(self) -> None:
        """Put the mark, which may replace the mark of a dead save or of a save of this run.

        Raises TargetError while another save is alive.
        """
        try:
            self.put(create_only=True)
        except NameTakenError:
            if not self.is_ours:  # if it is, only the response to the write was lost
                self._take_over()
        self.begin()

    def declare_clear(self) -> None:
        """Record that all files in the folder belong to saves.

        After a crash the cleanup may then delete them.
        """
        if not self.cleared:
            self.cleared = True
            self.put()

    def check(self) -> None:
        """Raise TargetError if another save has taken over the folder."""
        if not self.is_ours:
            raise TargetError(
                f"{self.store.url}: taken over by {mark_holder(self.store, SAVING)}, which took "
                "this save for dead; nothing was committed"
            )

    def _take_over(self) -> None:
        content = read_mark(self.store, SAVING)
        is_of_this_run = self.run_id is not None and content.get("run_id") == self.run_id
        if not is_of_this_run and self._is_other_alive():
            raise TargetError(
                f"{self.store.url}: {mark_holder(self.store, SAVING)} is saving there, or was "
                "killed less than ten minutes ago; use another name, or try again then"
            )
        self.cleared = bool(content.get("cleared"))
        self.put()
        self.check()

    def _is_other_alive(self) -> bool:
        now = store_time(self.store)
        mark = self.store.stat(SAVING)
        return mark is not None and may_live(self.store, mark, now)


def clear_spent_mark(store: Store) -> bool:
    """Delete the mark of a save that was killed after it committed the checkpoint in `store`.

    Return True if there was such a mark. A mark that cannot be read or deleted now stays.
    """
    with suppress(CheckpointError):
        token = read_mark(store, SAVING).get("token")
        if token is not None and load_manifest(store).token == token:
            store.delete([SAVING])
            return True
    return False
