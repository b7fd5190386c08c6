"""Keeps the writers that a run has invited, and their session.

A writer is another process that hands in files for each checkpoint of the run. A session is one
invitation: it ends when the saver closes, or when the run invites writers again.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ft_ckpt.errors import CheckpointError
from ft_ckpt.messages import warn
from ft_ckpt.ranks import Ranks
from ft_ckpt.runs.saves.extension_parts import WriterSession, open_writer_session
from ft_ckpt.storage import Store
from ft_ckpt.storage.digests import FileRecord
from ft_ckpt.storage.places import Place

# moves the writers' files into the folder of a save; returns their records, and notes
Collect = Callable[[Store], tuple[list[FileRecord], list[str]]]


@dataclass(eq=False)
class InvitedWriters:
    """The invited writers of a run.

    Attributes:
        is_optional: Whether a writer is optional, by its name.
        timeout_seconds: How long a save waits for the files of writers.
        session: Their session on rank 0; None on the other ranks.
        is_invited: Whether the run has ever invited writers. The same on all ranks.
    """

    is_optional: Mapping[str, bool] = field(default_factory=dict)
    timeout_seconds: float = 0.0
    session: WriterSession | None = None
    is_invited: bool = False

    def invite(
        self,
        directory: Place,
        is_optional: Mapping[str, bool],
        start: Place | None,
        allow: Iterable[str],
        timeout_seconds: float,
        ranks: Ranks,
    ) -> str:
        """Open a session below `directory`, and close an earlier one. Returns its token.

        Collective: call it on every rank. The writers continue from the checkpoint `start`. Raises
        as `CheckpointSaver.invite` does.
        """
        self.is_optional = is_optional
        self.timeout_seconds = timeout_seconds
        self.is_invited = True

        def open_on_leader() -> str:
            if not ranks.is_main:
                return ""
            self.end()
            self.session = open_writer_session(
                directory.absolute, is_optional, start, allow, timeout_seconds
            )
            return self.session.token

        token, error = ranks.attempt(open_on_leader)
        value = {"writers": sorted(is_optional), "token": token}
        agreed = ranks.agree("saver.invite()", value, error, same=("writers",))
        return str(agreed.result["token"])

    def ask(self, step: int, ranks: Ranks) -> None:
        """Ask the writers for their files of `step`.

        Collective: call it on every rank. Raises WriterError naming a writer that has failed.
        """

        def ask_on_leader() -> None:
            if self.session is not None:
                self.session.ask(step)

        if self.is_invited:
            ranks.run("the writers of save_state()", ask_on_leader)

    def collector(self, step: int) -> Collect | None:
        """Return the function that moves the files of `step` into the folder of a save.

        Returns None if no session is open.
        """
        return None if self.session is None else partial(self.session.collect, step)

    def note_committed(self, checkpoint: Place, path: Path | str) -> None:
        """Tell the writers that `checkpoint` is committed.

        An error becomes a warning, which names `path`.
        """
        if self.session is None:
            return
        try:
            self.session.note_committed(checkpoint)
        except CheckpointError as error:
            warn(f"{path}: saved, but its writers could not be notified: {error}")

    def end(self) -> None:
        """Close the session, after which the writers end."""
        if self.session is not None:
            self.session.close()
            self.session = None
