"""The mark of a save to a bucket that is under way: who makes it, and until when nobody else may begin one there.

Objects of a save lie under their final names before there is a manifest. So that two saves do not mix theirs, each puts
its mark first, if there is none, and again each minute. A save that was killed leaves its mark behind: the same run
takes that over at once, anybody else when it counts no more, see `marks`. One that was only thought dead finds
another's token in the mark when it wants to commit, and gives up; what it has written over by then, readers tell by its
version.
"""

import threading
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ft_ckpt.checkpoint.catalog import load_manifest
from ft_ckpt.checkpoint.marks import BEAT_SECONDS, SAVING, mark_holder, may_live, put_mark, read_mark, store_time
from ft_ckpt.errors import CheckpointError, MissingError, NameTakenError, TargetError
from ft_ckpt.storage.store import Store


def clear_spent_mark(store: Store) -> bool:
    """Delete the mark of a save that was killed when it had committed the checkpoint in `store`; whether there was one.

    What cannot be read or deleted now stays.
    """
    with suppress(CheckpointError):
        token = read_mark(store, SAVING).get("token")
        if token is not None and load_manifest(store).token == token:
            store.delete([SAVING])
            return True
    return False


@dataclass(eq=False)
class SaveMark:
    """The mark of one save in the folder `store`, held until `release`."""

    store: Store
    run_id: str | None
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    cleared: bool = False  # all that is in the folder is of this save, or of the dead ones that it took over
    _over: threading.Event = field(default_factory=threading.Event)
    _beats: threading.Thread | None = None

    @property
    def is_held(self) -> bool:
        """Whether it was taken and not released."""
        return self._beats is not None and not self._over.is_set()

    @property
    def is_ours(self) -> bool:
        """Whether no other save has taken the folder over. Raises UnreadableError where that cannot be told now."""
        try:
            return self.token.encode() in self.store.read(SAVING)
        except MissingError:
            return False

    def take(self) -> None:
        """Put the mark, in the place of a dead save's if there is one. Raises TargetError while another lives."""
        try:
            put_mark(self.store, SAVING, create_only=True, **self._facts)
        except NameTakenError:
            if not self.is_ours:  # else the answer was lost
                self._take_over()
        self._beats = threading.Thread(target=self._renew, name="ft_ckpt-saving", daemon=True)
        self._beats.start()

    def declare_clear(self) -> None:
        """Say, for those who find the mark when this process is dead, that the folder held nothing before."""
        if not self.cleared:
            self.cleared = True
            put_mark(self.store, SAVING, **self._facts)

    def check(self) -> None:
        """Raise TargetError when another save has taken the folder over."""
        if not self.is_ours:
            raise TargetError(
                f"{self.store.url}: taken over by {mark_holder(self.store, SAVING)}, which took this save for dead; "
                "nothing was committed"
            )

    def release(self) -> None:
        """Take the mark away, if it is ours still; after `stop`."""
        self.stop()
        with suppress(CheckpointError):  # else it is dead in ten minutes
            if self.is_ours:
                self.store.delete([SAVING])

    def stop(self) -> None:
        """Renew it no more."""
        self._over.set()
        if self._beats is not None:
            self._beats.join()

    @property
    def _facts(self) -> dict[str, Any]:
        return {"run_id": self.run_id, "token": self.token, "cleared": self.cleared}

    def _take_over(self) -> None:
        found = read_mark(self.store, SAVING)
        is_own = self.run_id is not None and found.get("run_id") == self.run_id
        if not is_own and self._is_alive():
            raise TargetError(
                f"{self.store.url}: {mark_holder(self.store, SAVING)} is saving there, or was killed less than ten "
                "minutes ago; use another name, or try again then"
            )
        self.cleared = bool(found.get("cleared"))
        put_mark(self.store, SAVING, **self._facts)
        self.check()

    def _is_alive(self) -> bool:
        """Whether the process of the mark that is there may live, by the clock of the store."""
        now, mark = store_time(self.store), self.store.stat(SAVING)
        return mark is not None and may_live(self.store, mark, now)

    def _renew(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            with suppress(CheckpointError):
                if not self.is_ours:
                    return
                put_mark(self.store, SAVING, **self._facts)
