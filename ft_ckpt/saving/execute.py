"""Runs one save: plans it, compares the plans of all ranks, writes the files, commits them.

The steps are in `try_save`. A save may need several attempts. If replicas differ, it is planned
again. If the disk is full, it is tried again once there is space.

The ranks agree twice: before a tensor moves, and at the commit. To agree means that they exchange
their outcomes, and that an error of one rank is raised on all ranks. A background save agrees once
more in the call, before its thread runs these steps.
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
    """The input of one attempt to carry out a save.

    Attributes:
        make_request: Returns the request. Its error is raised on all ranks.
        plan: The plan of the save; None if it must be planned.
        writes: The bytes that each rank writes, if the save is from a snapshot; None if they must
            be planned.
        sources: Maps each planned tensor to the one to read: the live tensor or its copy.
        full_count: How many attempts have filled the disk.
        unmatched_paths: Planned files of frozen tensors that equal no earlier file.
    """

    make_request: Callable[[], SaveRequest]
    plan: SavePlan | None = None
    writes: WritePlan | None = None
    sources: SourceView = live
    full_count: int = 0
    unmatched_paths: frozenset[str] = frozenset()

    def with_new_plan(self, agreed: AgreedSave) -> "Attempt":
        """Return the next attempt, which plans again to store the replicas of the first rank."""
        return replace(self, make_request=lambda: agreed.plan.request, plan=None)

    def after_full_disk(self, agreed: AgreedSave, reused: ReusedFiles) -> "Attempt":
        """Return the next attempt, which has the same plan."""
        unmatched_paths = agreed.candidates.keys() - reused.digests.keys()
        return replace(
            self,
            make_request=lambda: agreed.plan.request,
            plan=agreed.plan,
            full_count=self.full_count + 1,
            unmatched_paths=self.unmatched_paths | unmatched_paths,
        )


def run_save(attempt: Attempt, context: SaveContext) -> SaveReport:
    """Try a save until it is committed or fails; return its report.

    Collective: call it on every rank. Raises what `CheckpointSaver.save` raises.
    """
    outcome = try_save(attempt, context)
    while isinstance(outcome, Attempt):
        outcome = try_save(outcome, context)
    return outcome


def try_save(attempt: Attempt, context: SaveContext) -> SaveReport | Attempt:
    """Go through the steps of a save once.

    Returns the report of the save, or the attempt that must follow. Collective: call it on every
    rank.
    """
    ranks, config, sources = context.ranks, context.config, attempt.sources
    plan: SavePlan | None = None
    stage: StagedSave | None = None
    reused = ReusedFiles()
    written: WrittenFiles | None = None
    try:
        # Each `deferring_error` block keeps its error. The agreement after the block raises this
        # error on all ranks, so no rank waits for a rank that has failed.
        with ranks.deferring_error() as preparing:
            request = attempt.make_request()
            plan = attempt.plan or plan_save(request, ranks, config)
            # An attempt with planned writes is of a background save, whose thread never gathers.
            may_gather = attempt.writes is None
            stage = open_stage(
                plan, context, attempt.full_count, attempt.unmatched_paths, may_gather
            )

        # A save that cannot work is refused here, before any rank waits for tensors of another.
        agreed = agree_on_plan("save()", plan, stage, preparing.error, context)
        plan = agreed.plan
        if agreed.replicas_differ:
            return attempt.with_new_plan(agreed)

        with ranks.deferring_error() as writing:
            writes = attempt.writes or plan_writes(plan, config, ranks.size, agreed.has_state_dict)
            reused = reuse_files(plan, agreed.candidates, stage.store, sources, ranks)
            written = write_files(writes, reused, sources, stage, agreed, context)

        report = commit_files(stage, agreed, written, writing.error, context)
    except BaseException:
        # The file system may have changed, so the next save finds out again how ranks share it.
        context.shared_folders.forget()
        raise
    finally:
        if stage is not None:
            stage.discard()

    if report is None:  # the disk is full, and the settings say to try again
        return attempt.after_full_disk(agreed, reused)
    return follow_up(plan.request, report)
