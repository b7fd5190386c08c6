"""The folder that becomes the checkpoint, with everything in it but the weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ft_ckpt.checkpoint import commit, free_space
from ft_ckpt.config import SaverConfig
from ft_ckpt.distributed.ranks import Ranks
from ft_ckpt.errors import explained
from ft_ckpt.saving import reuse_frozen
from ft_ckpt.saving.files import PartPlan
from ft_ckpt.saving.plan import SaveRequest
from ft_ckpt.saving.planned_save import PlannedSave
from ft_ckpt.saving.reuse_frozen import Offer

_MANIFEST_BYTES = 16 << 20  # room for what is not known yet in the look at free space


@dataclass(frozen=True, eq=False)
class StagedSave:
    """A planned save, and on rank 0 the stage that has everything but the weights."""

    planned: PlannedSave
    stage: Path | None = None
    offers: Mapping[str, Offer] = field(default_factory=dict)  # frozen files that may be there already

    @property
    def plans(self) -> tuple[PartPlan, ...]:
        """The parts and their files."""
        return self.planned.plan.plans


def prepare_stage(
    request: SaveRequest, planned: PlannedSave, ranks: Ranks, config: SaverConfig, tries: int, changed: frozenset[str]
) -> StagedSave:
    """On rank 0 fill a stage with everything but weights.

    Frozen files of earlier checkpoints are in it, too, but for those that are known to have `changed`.
    """
    if not ranks.leads:
        return StagedSave(planned)
    contents = planned.companions.contents()
    stage = commit.open_stage(request.target)
    try:
        offers = _find_offers(request, planned.plan.plans, ranks, config, stage, changed)
        files = [file for one in planned.plan.plans for file in one.files]
        total = sum(file.layout.size_bytes for file in files if file.path not in offers)
        free_space.ensure_space(
            request.target,
            total + sum(map(len, contents.values())) + _MANIFEST_BYTES,
            config,
            step=request.step,
            run_id=request.run_id,
            protect=request.protect,
            tries=tries,
        )
        with explained(request.target):
            for path, content in contents.items():
                (stage / path).parent.mkdir(parents=True, exist_ok=True)
                (stage / path).write_bytes(content)
        return StagedSave(planned, stage, offers)
    except BaseException:
        commit.discard_stage(stage)
        raise


def _find_offers(
    request: SaveRequest,
    plans: Sequence[PartPlan],
    ranks: Ranks,
    config: SaverConfig,
    stage: Path,
    changed: frozenset[str],
) -> dict[str, Offer]:
    if request.state_dict_given or config.nonfinite == "raise":  # which looks at all numbers
        return {}
    shares = [share for share in reuse_frozen.frozen_shares(plans, ranks.size) if share.file.path not in changed]
    return reuse_frozen.link_candidates(shares, request.target, stage, ranks, config.each_rank_writes != "on")
