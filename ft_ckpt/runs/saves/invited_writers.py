"""The writers that a run has invited, and the session through which they hand in their files."""

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

Collect = Callable[[Store], tuple[list[FileRecord], list[str]]]


@dataclass(eq=False)
class InvitedWriters:
    """The invited writers of a run; on rank 0 their session."""

    is_optional: Mapping[str, bool] = field(default_factory=dict)  # by name
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
        """Open a session below `directory`, and close an earlier one; return its token.

        Collective: call it on every rank. The writers continue from the checkpoint `start`. Raises
        as `CheckpointSaver.invite` does.
        """
        self.is_optional, self.timeout_seconds = is_optional, timeout_seconds
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
        return str(ranks.agree("saver.invite()", value, error, same=("writers",)).result["token"])

    def ask(self, step: int, ranks: Ranks) -> None:
        """Request from the writers their state at `step`.

        Collective: call it on every rank. Raises as `CheckpointSaver.save_state` does for a failed
        writer.
        """

        def ask_on_leader() -> None:
            if self.session is not None:
                self.session.ask(step)

        if self.is_invited:
            ranks.run("the writers of save_state()", ask_on_leader)

    def collector(self, step: int) -> Collect | None:
        """Return what moves the files of `step` into the stage of a save.

        Returns None if no session is open.
        """
        return None if self.session is None else partial(self.session.collect, step)

    def note_committed(self, checkpoint: Place, path: Path | str) -> None:
        """Tell the writers of the `checkpoint`, which warnings name by its `path`."""
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
