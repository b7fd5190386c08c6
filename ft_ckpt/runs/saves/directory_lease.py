"""Takes, checks and releases the lease of a run's directory for the ranks of one saver.

A lease is a mark in the directory, which keeps other processes from training into it.
"""

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
    """The lease of the directory of a run. Rank 0 holds it for all ranks.

    Attributes:
        directory: The directory. Without one there is no lease.
        lease: The lease on rank 0; None on the other ranks.
        pid: The id of this process when the lease was taken; None before that. A forked child has
            another id, and takes the lease again.
    """

    directory: Place | None
    lease: RunLease | None = None
    pid: int | None = None

    def take(self, config: SaverConfig) -> None:
        """Take the lease at the first save or resume of this process; later calls do nothing.

        Collective: call it on every rank. If the directory cannot be written now, there is no
        lease, and the next call tries again: the save itself reports the error. With the setting
        `staging` there is one try only, because saves are committed elsewhere.

        Raises LeaseTakenError naming another process that trains into the directory. Raises
        RanksDisagreeError if there are several ranks and no process group.
        """
        if self.directory is None or not config.lease or self.pid == os.getpid():
            return
        ranks = current_ranks(config.enter_timeout_seconds, needs_group=True)

        def take_on_leader() -> bool:
            return self._take() if ranks.is_main else False

        is_taken, error = ranks.attempt(take_on_leader)
        agreed = ranks.agree("the lease of the run", {"taken": is_taken}, error)
        if agreed.result["taken"] or config.staging is not None:
            self.pid = os.getpid()

    def check(self) -> None:
        """Raise LeaseTakenError on rank 0 if another process has taken the directory over."""
        if self.lease is not None:
            self.lease.check()

    def end(self) -> None:
        """Release the lease, unless another saver of this process uses it."""
        if self.lease is not None:
            self.lease.leave(self)
        self.lease = None
        self.pid = None

    def _take(self) -> bool:
        """Take the lease, and return whether there is one. Raises LeaseTakenError."""
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
