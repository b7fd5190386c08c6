"""Opens the staging of a save on rank 0, and writes everything except the weights into it."""

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
class StagedSave:
    """A save whose sidecar files are staged; empty on ranks other than 0."""

    staging: Staging | None = None
    files: tuple[FileRecord, ...] = ()  # sidecar files, written into the staging
    # files of earlier checkpoints that frozen files may equal, by path
    offers: Mapping[str, Offer] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # on parts that transformers would not load

    @property
    def store(self) -> Store | None:
        """The store of the staging, None on ranks other than 0."""
        return None if self.staging is None else self.staging.store

    def discard(self) -> None:
        """Delete the staging, unless it is committed."""
        if self.staging is not None:
            self.staging.discard()


def open_stage(
    plan: SavePlan,
    context: SaveContext,
    tries: int = 0,
    changed: frozenset[str] = frozenset(),
    may_gather: bool = True,
) -> StagedSave:
    """Open a staging on rank 0, and write everything except the weights into it.

    The staging also gets links to frozen files of earlier checkpoints, except for the paths in
    `changed`, which no earlier checkpoint has. `tries` is how often this save has filled the disk.
    `may_gather` says whether tensors may move between ranks to compare frozen files. Raises
    CompanionError for a model that its config does not describe, TargetError or NoSpaceError if the
    target cannot be written.
    """
    request, config = plan.request, context.config
    if not context.ranks.is_main:
        return StagedSave()
    with explained(request.target):
        notes = check_configs(plan.plans, plan.companions, request)
        staging = open_staging_at(
            request.target,
            saver_tuning(config).direct_bytes,
            run_id=request.run_id,
            overwrite=config.overwrite,
            max_mode=request.max_mode,
        )
        try:
            offers = _offer_frozen_files(plan, staging, context, changed, may_gather)
            records = _write_sidecars(plan, staging, offers, config, tries)
        except BaseException:
            staging.discard()
            raise
        return StagedSave(staging, records, offers, notes)


def _write_sidecars(
    plan: SavePlan, staging: Staging, offers: Mapping[str, Offer], config: SaverConfig, tries: int
) -> tuple[FileRecord, ...]:
    """Write the sidecar files, as soon as the disk has space for the whole checkpoint."""
    request = plan.request
    contents = sorted(plan.companions.contents().items())
    needed_bytes = _needed_bytes(plan, offers)
    needed_bytes += sum(len(content) for _, content in contents)
    space.ensure_space(request.target, needed_bytes, config, tries, request.make_room)
    for path, content in contents:
        staging.store.write(path, content)
    return tuple(record_of(path, content) for path, content in contents)


def _offer_frozen_files(
    plan: SavePlan,
    staging: Staging,
    context: SaveContext,
    changed: frozenset[str],
    may_gather: bool,
) -> dict[str, Offer]:
    """Link earlier files that the planned frozen files may equal into the staging."""
    ranks, config = context.ranks, context.config
    if config.reuse_frozen == "off":
        return {}
    if config.nonfinite == "raise":  # looks at every value, and a linked file is not read
        return {}
    if plan.request.state_dict is not None:  # other ranks lack its values, and cannot digest them
        return {}
    frozen = reuse_frozen.frozen_files(plan.plans, ranks.size)
    frozen = [planned for planned in frozen if planned.file.path not in changed]
    gathers = may_gather and config.each_rank_writes != "on"
    return reuse_frozen.link_candidates(frozen, staging, ranks, gathers)


def _needed_bytes(plan: SavePlan, offers: Mapping[str, Offer]) -> int:
    """Return the size of the manifest and of all weight files without an offer."""
    needed = _MANIFEST_BYTES
    for part_plan in plan.plans:
        for file in part_plan.files:
            if file.path not in offers:
                needed += file.layout.size_bytes
    return needed


def saver_tuning(config: SaverConfig) -> WriteTuning:
    return tuning_for(config.io_threads, config.direct_io, BLOCK_BYTES, config.digest == "sha256")
