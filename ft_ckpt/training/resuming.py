"""Brings a run back: chooses a checkpoint, reads it, and takes another where it turns out to be damaged."""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack

from ft_ckpt.distributed.ranks import Ranks
from ft_ckpt.training.choosing import open_agreed
from ft_ckpt.training.run import TrainingRun
from ft_ckpt.training.starting import Wanted


def resume_run(
    run: TrainingRun, wanted: Wanted, ranks: Ranks, allow: Iterable[str] | bool, versions: Mapping[str, str]
) -> None:
    """Put `run` back to where the checkpoint that is wanted was made; leave it as it is for a fresh start. Collective.

    What a run has been trained to in this process is not put at stake: digests are compared before any of it is
    overwritten. Else that is done while the files are read, which are read once then. `allow` and errors as for
    `CheckpointSaver.resume`.
    """
    allowed = allow if isinstance(allow, bool) else frozenset([allow] if isinstance(allow, str) else allow)
    while True:
        with ExitStack() as stack:
            point, branch = open_agreed(wanted, ranks, stack)
            if point is None:
                return
            damage = run.restore_state(point, ranks, allowed, versions)
            if not damage.problems:
                run.branch_off(branch)
                return
        wanted = wanted.without(point, damage.problems)
