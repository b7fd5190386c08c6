"""Rank 0 chooses the checkpoint that a run resumes from; all ranks then have it open."""

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace

from ft_ckpt.checkpoint.catalog import Listing, in_run_order, list_checkpoints, list_readable
from ft_ckpt.checkpoint.prune import recover_all
from ft_ckpt.distributed.ranks import Ranks
from ft_ckpt.errors import ManifestError, listing
from ft_ckpt.storage.place import Place
from ft_ckpt.training import starting
from ft_ckpt.training.exchange import hear_leader
from ft_ckpt.training.serve_files import CheckpointFacts, checkpoint_facts, open_to_all
from ft_ckpt.training.starting import Wanted
from ft_ckpt.training.state_files import ResumePoint


@dataclass(frozen=True)
class _Choice:
    """What rank 0 resumes from, of what it was asked for."""

    mode: str
    found: CheckpointFacts | None = None  # None: the run begins afresh
    branch: str | None = None  # the name of the run that begins there, if it is another
    late: bool = False  # digests are compared while the files are read


def open_agreed(wanted: Wanted, ranks: Ranks, stack: ExitStack) -> tuple[ResumePoint | None, str | None]:
    """The checkpoint that rank 0 chooses, open on every rank as long as the stack; and the name of the run that begins
    there, if it is another. Collective.

    Raises what `starting.open_chosen` does, RankError when another rank failed.
    """
    point: ResumePoint | None
    chosen, error = ranks.attempt(lambda: _choose_and_open(wanted, stack) if ranks.leads else None)
    point, choice = chosen or (None, _Choice(str(wanted.mode)))
    choice = hear_leader(ranks, "resume()", _Choice, choice, error, same=("mode",))
    if choice.found is not None and ranks.size > 1:
        point = open_to_all(point, choice.found, wanted.called, ranks, stack, wanted.deep, choice.late)
    return point if point is None else replace(point, is_proved_late=choice.late), choice.branch


def _choose_and_open(wanted: Wanted, stack: ExitStack) -> tuple[ResumePoint, _Choice] | None:
    listings: list[Listing] = []
    for folder in wanted.places.folders:
        recover_all(folder)  # of what saves have left that were killed
        listings.append(_list_for(wanted, folder))
    infos = [info for listed in listings for info in listed.found]
    if wanted.places.directory is not None:
        infos = in_run_order(infos)
        starting.warn_of_others(wanted.places.directory, infos, wanted.mode)
    point = starting.open_chosen(wanted, infos, stack)
    if point is None:
        if wanted.mode == "auto":
            _refuse_damaged(listings)
        return None
    branch = starting.branch_run_id(wanted, point.checkpoint, infos)
    return point, _Choice(str(wanted.mode), checkpoint_facts(point.checkpoint), branch, bool(point.tensors.proofs))


def _list_for(wanted: Wanted, folder: Place) -> Listing:
    """The checkpoints in a folder of the run; all manifests are needed to find the newest."""
    if wanted.mode in ("auto", "must"):
        return list_readable(folder)
    listed = list_checkpoints(folder)
    listed.warn_left_out()
    return listed


def _refuse_damaged(listings: Iterable[Listing]) -> None:
    """Raise for damaged manifests: a run does not begin afresh beside what may be its own."""
    for listed in listings:
        if listed.damaged:
            told = listing([str(error) for error in listed.damaged.values()])
            raise ManifestError(f"{told}; there is nothing else to resume from: move it away to begin afresh")
