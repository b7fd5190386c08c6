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
    # everything in the folder is of this save, or of dead ones that it took over
    cleared: bool = False

    @property
    def facts(self) -> dict[str, Any]:
        return {**super().facts, "run_id": self.run_id, "cleared": self.cleared}

    def take(self) -> None:
        """Put the mark, replacing that of a dead save or of this run.

        Raises TargetError while another is alive.
        """
        try:
            self.put(create_only=True)
        except NameTakenError:
            if not self.is_ours:  # otherwise the response of our own write was lost
                self._take_over()
        self.begin()

    def declare_clear(self) -> None:
        """Record that no foreign files are in the folder, for the cleanup after a crash."""
        if not self.cleared:
            self.cleared = True
            self.put()

    def check(self) -> None:
        """Raise TargetError when another save has taken the folder over."""
        if not self.is_ours:
            raise TargetError(
                f"{self.store.url}: taken over by {mark_holder(self.store, SAVING)}, which took "
                "this save for dead; nothing was committed"
            )

    def _take_over(self) -> None:
        facts = read_mark(self.store, SAVING)
        is_of_this_run = self.run_id is not None and facts.get("run_id") == self.run_id
        if not is_of_this_run and self._is_other_alive():
            raise TargetError(
                f"{self.store.url}: {mark_holder(self.store, SAVING)} is saving there, or was "
                "killed less than ten minutes ago; use another name, or try again then"
            )
        self.cleared = bool(facts.get("cleared"))
        self.put()
        self.check()

    def _is_other_alive(self) -> bool:
        now = store_time(self.store)
        mark = self.store.stat(SAVING)
        return mark is not None and may_live(self.store, mark, now)


def clear_spent_mark(store: Store) -> bool:
    """Delete the mark of a save that was killed after it committed the checkpoint in `store`.

    True if there was one. A mark that cannot be read or deleted now stays.
    """
    with suppress(CheckpointError):
        token = read_mark(store, SAVING).get("token")
        if token is not None and load_manifest(store).token == token:
            store.delete([SAVING])
            return True
    return False
