"""Opens the stage of a save on rank 0, with everything in it but the weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ft_ckpt.checkpoint.commit import Staging, open_staging_at
from ft_ckpt.config import SaverConfig
from ft_ckpt.errors import explained
from ft_ckpt.saving import reuse_frozen, space
from ft_ckpt.saving.context import SaveContext
from ft_ckpt.saving.planning import SavePlan, check_configs
from ft_ckpt.saving.reuse_frozen import Offer
from ft_ckpt.storage import Store
from ft_ckpt.storage.digests import FileRecord, record_of
from ft_ckpt.storage.io import BLOCK_BYTES, WriteTuning, tuning_for

_MANIFEST_BYTES = 16 << 20  # reserved in the check of free space


@dataclass(frozen=True, eq=False)
class OpenStage:
    """The stage of a save; on rank 0 with everything in it but the weights."""

    staging: Staging | None = None  # on rank 0
    files: tuple[FileRecord, ...] = ()  # already written
    # earlier files that frozen ones may equal, by path
    offers: Mapping[str, Offer] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # on what transformers would not load

    @property
    def store(self) -> Store | None:
        """The store of the stage, on rank 0."""
        return None if self.staging is None else self.staging.store

    def discard(self) -> None:
        """Delete the stage, unless it is committed."""
        if self.staging is not None:
            self.staging.discard()


def open_stage(
    plan: SavePlan,
    context: SaveContext,
    tries: int = 0,
    changed: frozenset[str] = frozenset(),
    may_gather: bool = True,
) -> OpenStage:
    """On rank 0 open a stage and write everything except weights into it.

    It also gets the frozen files of earlier checkpoints, except those known to have `changed`.
    `tries`: how often this save has filled the disk. `may_gather`: whether tensors may move between
    ranks to compare frozen files. Raises CompanionError for a model that its config does not
    describe, TargetError or NoSpaceError when it cannot be written.
    """
    request, config = plan.request, context.config
    if not context.ranks.is_main:
        return OpenStage()
    with explained(request.target):
        notes = check_configs(plan.plans, plan.companions, request)
        stage = open_staging_at(
            request.target,
            saver_tuning(config).direct_bytes,
            run_id=request.run_id,
            overwrite=config.overwrite,
            max_mode=request.max_mode,
        )
        try:
            offers = _offered_files(plan, stage, context, changed, may_gather)
            records = _write_sidecars(plan, stage, offers, config, tries)
        except BaseException:
            stage.discard()
            raise
        return OpenStage(stage, records, offers, notes)


def _write_sidecars(
    plan: SavePlan, stage: Staging, offers: Mapping[str, Offer], config: SaverConfig, tries: int
) -> tuple[FileRecord, ...]:
    """Write all files but the weights, once there is room for everything."""
    request = plan.request
    contents = sorted(plan.companions.contents().items())
    needed_bytes = _needed_bytes(plan, offers)
    needed_bytes += sum(len(content) for _, content in contents)
    space.ensure_space(request.target, needed_bytes, config, tries, request.make_room)
    for path, content in contents:
        stage.store.write(path, content)
    return tuple(record_of(path, content) for path, content in contents)


def _offered_files(
    plan: SavePlan,
    stage: Staging,
    context: SaveContext,
    changed: frozenset[str],
    may_gather: bool,
) -> dict[str, Offer]:
    """Link frozen files of earlier checkpoints into the stage, which the planned ones may equal."""
    ranks, config = context.ranks, context.config
    reads_all_values = config.nonfinite == "raise" or plan.request.state_dict is not None
    if config.reuse_frozen == "off" or reads_all_values:
        return {}
    frozen = reuse_frozen.frozen_files(plan.plans, ranks.size)
    frozen = [planned for planned in frozen if planned.file.path not in changed]
    gathers = may_gather and config.each_rank_writes != "on"
    return reuse_frozen.link_candidates(frozen, stage, ranks, gathers)


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
