"""One save, from the request to what follows its commit, in steps that every caller takes.

All ranks agree before a tensor moves and at the commit. The call of a background save plans it, and
agrees once more.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from ft_ckpt.saving.agree import AgreedSave, agree_on_plan
from ft_ckpt.saving.commit_files import commit_files, follow_up
from ft_ckpt.saving.context import SaveContext
from ft_ckpt.saving.planning import (
    SavePlan,
    SaveReport,
    SaveRequest,
    WritePlan,
    plan_save,
    plan_writes,
)
from ft_ckpt.saving.regions import SourceView, live
from ft_ckpt.saving.reuse_frozen import ReusedFiles, reuse_files
from ft_ckpt.saving.stage import StagedSave, open_stage
from ft_ckpt.saving.write import WrittenFiles, write_files


@dataclass(frozen=True, eq=False)
class Attempt:
    """What one attempt of a save begins with."""

    make_request: Callable[[], SaveRequest]  # its error is raised on all ranks
    plan: SavePlan | None = None  # None: not planned yet
    writes: WritePlan | None = None  # of a snapshot, whose replicas were compared before
    sources: SourceView = live
    tries: int = 0  # attempts that ended with a full disk
    # paths of files of frozen tensors whose contents were in no earlier checkpoint
    changed: frozenset[str] = frozenset()

    def planned_again(self, agreed: AgreedSave) -> "Attempt":
        """Return the next attempt, with a new plan that stores the first rank's replicas."""
        return replace(self, make_request=lambda: agreed.plan.request, plan=None)

    def tried_again(self, agreed: AgreedSave, reused: ReusedFiles) -> "Attempt":
        """Return the next attempt of the same plan, after a full disk."""
        return replace(
            self,
            make_request=lambda: agreed.plan.request,
            plan=agreed.plan,
            tries=self.tries + 1,
            changed=self.changed | (agreed.offers.keys() - reused.digests.keys()),
        )


def run_save(attempt: Attempt, context: SaveContext) -> SaveReport:
    """Try a save until it is committed or refused. Collective.

    Raises what `CheckpointSaver.save` raises.
    """
    outcome = try_save(attempt, context)
    while isinstance(outcome, Attempt):
        outcome = try_save(outcome, context)
    return outcome


def try_save(attempt: Attempt, context: SaveContext) -> SaveReport | Attempt:
    """Go through the steps of a save once. Collective.

    Return its report, or the attempt that has to follow.
    """
    ranks, config, sources = context.ranks, context.config, attempt.sources
    plan: SavePlan | None = None
    stage: StagedSave | None = None
    reused = ReusedFiles()
    written: WrittenFiles | None = None
    try:
        # An error of a block is kept; the agreement after it raises it on all ranks.
        with ranks.deferring_error() as preparing:
            request = attempt.make_request()
            plan = attempt.plan or plan_save(request, ranks, config)
            gathers = (
                attempt.writes is None
            )  # a snapshot brings its writes; its thread never gathers
            stage = open_stage(plan, context, attempt.tries, attempt.changed, gathers)
        # What plans and replicas show is refused here, before a tensor moves: later, ranks depend
        # on each other.
        agreed = agree_on_plan("save()", plan, stage, preparing.error, context)
        plan = agreed.plan
        if agreed.replicas_differ:
            return attempt.planned_again(agreed)
        with ranks.deferring_error() as writing:
            writes = attempt.writes or plan_writes(plan, config, ranks.size, agreed.has_state_dict)
            reused = reuse_files(plan, agreed.offers, stage.store, sources, ranks)
            written = write_files(writes, reused, sources, stage, agreed, context)
        report = commit_files(stage, agreed, written, writing.error, context)
    except BaseException:
        context.shared.forget()
        raise
    finally:
        if stage is not None:
            stage.discard()
    if report is None:  # the disk is full, and the settings say to try again
        return attempt.tried_again(agreed, reused)
    return follow_up(plan.request, report)
