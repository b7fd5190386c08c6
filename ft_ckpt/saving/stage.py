"""Opens the stage of a save on rank 0, with everything in it but the weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ft_ckpt.checkpoint import Staging, staging
from ft_ckpt.config import SaverConfig
from ft_ckpt.ranks import Ranks
from ft_ckpt.runs import prune
from ft_ckpt.saving import reuse_frozen
from ft_ckpt.saving.plan import SavePlan
from ft_ckpt.saving.request import SaveRequest
from ft_ckpt.saving.reuse_frozen import Offer
from ft_ckpt.saving.sidecars import check_configs
from ft_ckpt.storage import BLOCK_BYTES, FileRecord, WriteTuning, record_of, tuning_for

_MANIFEST_BYTES = 16 << 20  # reserved in the check of free space


@dataclass(frozen=True, eq=False)
class StagedSave:
    """A planned save; on rank 0 with a staging that holds everything except the weights."""

    plan: SavePlan
    staging: Staging | None = None
    files: tuple[FileRecord, ...] = ()  # already written
    # earlier files that frozen ones may equal, by path
    offers: Mapping[str, Offer] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # on what transformers would not load


def prepare_stage(
    request: SaveRequest,
    plan: SavePlan,
    ranks: Ranks,
    config: SaverConfig,
    tries: int,
    changed: frozenset[str],
    *,
    may_gather: bool,
) -> StagedSave:
    """On rank 0 open a stage and write everything except weights into it.

    It also gets the frozen files of earlier checkpoints, except those known to have `changed`;
    `may_gather`: whether tensors may move between ranks for their comparison. Raises CompanionError
    for a model that its config does not describe.
    """
    if not ranks.is_main:
        return StagedSave(plan)
    contents = sorted(plan.companions.contents().items())
    notes = check_configs(plan.plans, plan.companions, request)
    stage = staging.open_staging_at(
        request.target,
        saver_tuning(config).direct_bytes,
        run_id=request.run_id,
        overwrite=config.overwrite,
        max_mode=request.max_mode,
    )
    try:
        offers: dict[str, Offer] = {}
        reads_all_values = config.nonfinite == "raise" or request.state_dict is not None
        if config.reuse_frozen != "off" and not reads_all_values:
            frozen = reuse_frozen.frozen_files(plan.plans, ranks.size)
            frozen = [planned for planned in frozen if planned.file.path not in changed]
            gathers = may_gather and config.each_rank_writes != "on"
            offers = reuse_frozen.link_candidates(frozen, stage, ranks, gathers)
        prune.ensure_space(
            request.target,
            _needed_bytes(plan, offers) + sum(len(content) for _, content in contents),
            config,
            step=request.step,
            run_id=request.run_id,
            protect=request.protect,
            tries=tries,
        )
        for path, content in contents:
            stage.store.write(path, content)
        records = tuple(record_of(path, content) for path, content in contents)
        return StagedSave(plan, stage, records, offers, notes)
    except BaseException:
        stage.discard()
        raise


def _needed_bytes(plan: SavePlan, offers: Mapping[str, Offer]) -> int:
    """The room for the manifest and the weight files that may have to be written."""
    needed = _MANIFEST_BYTES
    for part_plan in plan.plans:
        for file in part_plan.files:
            if file.path not in offers:
                needed += file.layout.size_bytes
    return needed


def saver_tuning(config: SaverConfig) -> WriteTuning:
    return tuning_for(config.io_threads, config.direct_io, BLOCK_BYTES, config.digest == "sha256")
