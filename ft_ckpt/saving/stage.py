"""Opens the staging folder of a save on rank 0, and writes everything except the weights into it.

On a disk, the staging folder becomes the checkpoint when the save is committed. In a bucket, files
are staged under their final names, and the commit writes the manifest.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ft_ckpt.checkpoint.commit import Staging, open_staging_at
from ft_ckpt.config import SaverConfig
from ft_ckpt.errors import explained
from ft_ckpt.saving import reuse_frozen, space
from ft_ckpt.saving.context import SaveContext
from ft_ckpt.saving.planning import SavePlan, check_configs
from ft_ckpt.saving.reuse_frozen import Candidates
from ft_ckpt.storage import Store
from ft_ckpt.storage.digests import FileRecord, record_of
from ft_ckpt.storage.io import BLOCK_BYTES, WriteTuning, tuning_for

# The check of free space reserves this much for the manifest.
_MANIFEST_BYTES = 16 << 20


@dataclass(frozen=True, eq=False)
class StagedSave:
    """A save whose sidecar files are written. On ranks other than 0 all fields are empty.

    Sidecar files are all files without weights: configs, tokenizer, adapter settings.

    Attributes:
        staging: The staging folder.
        files: Records of the sidecar files in it.
        candidates: Earlier files that may equal the planned files of frozen tensors, by the path
            of the planned file.
        notes: Messages for the report and the manifest, about models that transformers would not
            load.
    """

    staging: Staging | None = None
    files: tuple[FileRecord, ...] = ()
    candidates: Mapping[str, Candidates] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def store(self) -> Store | None:
        """The store of the staging folder; None on ranks other than 0."""
        return None if self.staging is None else self.staging.store

    def discard(self) -> None:
        """Delete the staging folder, unless it is committed."""
        if self.staging is not None:
            self.staging.discard()


def open_stage(
    plan: SavePlan,
    context: SaveContext,
    full_count: int = 0,
    unmatched_paths: frozenset[str] = frozenset(),
    may_gather: bool = True,
) -> StagedSave:
    """Open a staging folder on rank 0, and write everything except the weights into it.

    Files of earlier checkpoints are linked into it, if they may equal a planned file of frozen
    tensors. `full_count` is how often this save has filled the disk. `unmatched_paths` are planned
    files of which an earlier attempt has found that they equal no earlier file. `may_gather` says
    whether tensors may move between ranks to compare files. Raises CompanionError for a model that
    its config does not describe, TargetError or NoSpaceError if the target cannot be written.
    """
    request, config = plan.request, context.config
    if not context.ranks.is_main:
        return StagedSave()
    with explained(request.target):
        notes = check_configs(plan.plans, plan.sidecars, request)
        staging = open_staging_at(
            request.target,
            saver_tuning(config).direct_bytes,
            run_id=request.run_id,
            overwrite=config.overwrite,
            max_mode=request.max_mode,
        )
        try:
            candidates = _link_candidates(plan, staging, context, unmatched_paths, may_gather)
            records = _write_sidecars(plan, staging, candidates, config, full_count)
        except BaseException:
            staging.discard()
            raise

        return StagedSave(staging, records, candidates, notes)


def _link_candidates(
    plan: SavePlan,
    staging: Staging,
    context: SaveContext,
    unmatched_paths: frozenset[str],
    may_gather: bool,
) -> dict[str, Candidates]:
    """Link earlier files that may equal a planned file of frozen tensors, if settings allow it."""
    ranks, config = context.ranks, context.config
    if config.reuse_frozen == "off":
        return {}

    # The check for NaN and infinity reads every value, but a linked file is not read.
    if config.nonfinite == "raise":
        return {}

    # Ranks other than 0 do not have the values of a state dict, so they cannot digest them.
    if plan.request.state_dict is not None:
        return {}
    planned_files = []
    for planned in reuse_frozen.frozen_files(plan.plans, ranks.size):
        if planned.file.path not in unmatched_paths:
            planned_files.append(planned)

    gathers = may_gather and config.each_rank_writes != "on"
    return reuse_frozen.link_candidates(planned_files, staging, ranks, gathers)


def _write_sidecars(
    plan: SavePlan,
    staging: Staging,
    candidates: Mapping[str, Candidates],
    config: SaverConfig,
    full_count: int,
) -> tuple[FileRecord, ...]:
    """Write the sidecar files, as soon as the disk has space for the whole checkpoint."""
    request = plan.request
    contents = sorted(plan.sidecars.contents().items())
    needed_bytes = _MANIFEST_BYTES
    needed_bytes += sum(len(content) for _, content in contents)
    for part_plan in plan.plans:
        for file in part_plan.files:
            if file.path not in candidates:
                needed_bytes += file.layout.size_bytes
    space.ensure_space(request.target, needed_bytes, config, full_count, request.make_room)
    for path, content in contents:
        staging.store.write(path, content)
    return tuple(record_of(path, content) for path, content in contents)


def saver_tuning(config: SaverConfig) -> WriteTuning:
    """Return the settings of the writers of files."""
    return tuning_for(config.io_threads, config.direct_io, BLOCK_BYTES, config.digest == "sha256")
