"""The lease of a run's directory, on all ranks of one saver."""

import os
from dataclasses import dataclass

from ft_ckpt.config import SaverConfig
from ft_ckpt.errors import CheckpointError, LeaseTakenError
from ft_ckpt.messages import LOG
from ft_ckpt.ranks import current_ranks
from ft_ckpt.runs.folder import RunLease, lease_run
from ft_ckpt.storage.places import Place


@dataclass(eq=False)
class DirectoryLease:
    """The lease of the directory of a run: rank 0 has it, the others know that it was taken."""

    directory: Place | None
    lease: RunLease | None = None  # on rank 0
    pid: int | None = None  # on every rank: its process when the lease was taken

    def take(self, config: SaverConfig) -> None:
        """Take the lease, for the first save or resume of this process.

        Collective: call it on every rank. A directory that cannot be written now gets no lease,
        because the save itself reports the error. Saves that are staged do not need the directory,
        so they request its lease once only. Raises LeaseTakenError naming another process that
        trains into the directory, RanksDisagreeError if this process has no group of its ranks.
        """
        if self.directory is None or not config.lease or self.pid == os.getpid():
            return
        ranks = current_ranks(config.enter_timeout_seconds, needs_group=True)
        is_taken, error = ranks.attempt(lambda: self._take_on_leader() if ranks.is_main else False)
        verdict = ranks.agree("the lease of the run", {"taken": is_taken}, error)
        if verdict.result["taken"] or config.staging is not None:
            self.pid = os.getpid()

    def check(self) -> None:
        """Raise LeaseTakenError, on rank 0, if another process has taken the directory over."""
        if self.lease is not None:
            self.lease.check()

    def end(self) -> None:
        """Release the lease, unless another saver of this process uses it."""
        if self.lease is not None:
            self.lease.leave(self)
        self.lease = self.pid = None

    def _take_on_leader(self) -> bool:
        assert self.directory is not None
        try:
            self.lease = lease_run(self.directory, self)
        except LeaseTakenError:
            raise
        except CheckpointError as error:
            LOG.warning(
                "%s: no lease of it, so other processes may train into it, too: %s",
                self.directory,
                error,
            )
        return self.lease is not None
