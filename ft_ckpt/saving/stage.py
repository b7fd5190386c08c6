"""The staging that becomes the checkpoint, with everything in it but the weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ft_ckpt.checkpoint import free_space, staging
from ft_ckpt.checkpoint.staging import Staging
from ft_ckpt.config import SaverConfig
from ft_ckpt.distributed.ranks import Ranks
from ft_ckpt.saving import reuse_frozen
from ft_ckpt.saving.files import PartPlan
from ft_ckpt.saving.plan import SavePlan
from ft_ckpt.saving.request import SaveRequest
from ft_ckpt.saving.reuse_frozen import Offer
from ft_ckpt.storage.digests import FileRecord, record_of
from ft_ckpt.storage.write_tuning import WriteTuning, tuning_for

_MANIFEST_BYTES = 16 << 20  # room for what is not known yet in the look at free space


@dataclass(frozen=True, eq=False)
class StagedSave:
    """A planned save, and on rank 0 the staging that has everything but the weights."""

    plan: SavePlan
    staging: Staging | None = None
    files: tuple[FileRecord, ...] = ()  # that are there
    offers: Mapping[str, Offer] = field(default_factory=dict)  # frozen files that may be there already


def prepare_stage(
    request: SaveRequest, plan: SavePlan, ranks: Ranks, config: SaverConfig, tries: int, changed: frozenset[str]
) -> StagedSave:
    """On rank 0 open a staging and write everything but weights into it.

    Frozen files of earlier checkpoints are in it, too, but for those that are known to have `changed`.
    """
    if not ranks.leads:
        return StagedSave(plan)
    contents = sorted(plan.companions.contents().items())
    opened = staging.open_staging_at(
        request.target,
        saver_tuning(config).direct_bytes,
        run_id=request.run_id,
        overwrite=config.overwrite,
        access=request.access,
    )
    try:
        offers = _find_offers(request, plan.plans, ranks, config, opened, changed)
        files = [file for one in plan.plans for file in one.files]
        total = sum(file.layout.size_bytes for file in files if file.path not in offers)
        free_space.ensure_space(
            request.target,
            total + sum(len(content) for _, content in contents) + _MANIFEST_BYTES,
            config,
            step=request.step,
            run_id=request.run_id,
            protect=request.protect,
            tries=tries,
        )
        for path, content in contents:
            opened.store.write(path, content)
        return StagedSave(plan, opened, tuple(record_of(path, content) for path, content in contents), offers)
    except BaseException:
        opened.discard()
        raise


def saver_tuning(config: SaverConfig) -> WriteTuning:
    """How files are written, as the settings say."""
    return tuning_for(config.io_threads, config.direct_io, config.io_block_bytes)


def _find_offers(
    request: SaveRequest,
    plans: Sequence[PartPlan],
    ranks: Ranks,
    config: SaverConfig,
    opened: Staging,
    changed: frozenset[str],
) -> dict[str, Offer]:
    if request.state_dict_given or config.reuse_frozen == "off" or config.nonfinite == "raise":  # looks at all numbers
        return {}
    shares = [share for share in reuse_frozen.frozen_shares(plans, ranks.size) if share.file.path not in changed]
    return reuse_frozen.link_candidates(shares, opened, ranks, config.each_rank_writes != "on")
