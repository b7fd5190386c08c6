"""The tensors of one save come into its files: by rank 0, or by every rank, whichever they can and which pays."""

import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ft_ckpt.config import SaverConfig
from ft_ckpt.distributed.gather import are_equal
from ft_ckpt.distributed.ranks import Ranks, try_action
from ft_ckpt.distributed.tensor_info import Source
from ft_ckpt.errors import IncompleteError
from ft_ckpt.formats.registry import format_named
from ft_ckpt.formats.write_files import write_files
from ft_ckpt.saving import reuse_frozen, write_shards
from ft_ckpt.saving.files import PartPlan, file_pieces
from ft_ckpt.saving.plan import SavePlan, SaveRequest
from ft_ckpt.storage.digests import FileRecord
from ft_ckpt.storage.progress import track_progress
from ft_ckpt.storage.write_tuning import tuning_for
from ft_ckpt.storage.writer import Writer

_PROBE = ".ft_ckpt-probe"


@dataclass(frozen=True, eq=False)
class SaveJob:
    """A save that all ranks have agreed to."""

    request: SaveRequest
    prepared: SavePlan
    answers: tuple[dict[str, Any], ...]
    ranks: Ranks
    config: SaverConfig
    begun: float
    taken: dict[str, str] = field(default_factory=dict)  # once known: digests of the files that are there, by path

    @property
    def unlinked_plans(self) -> tuple[PartPlan, ...]:
        """The files that are to be written."""
        return reuse_frozen.without_linked(self.prepared.plans, self.taken)


def write_tensors(job: SaveJob) -> list[FileRecord]:
    """Move and write the tensors, on rank 0 the records of all files in the stage. Collective.

    Raises IncompleteError for tensors that the model's config ties and that differ.
    """
    pairs = job.prepared.ties_to_check
    untied = [pair for pair in pairs if not are_equal(*pair, job.ranks, job.config.bucket_bytes)]
    linked = _link_frozen_files(job)
    shares = _create_shared_files(job)
    return linked + (_write_on_rank_0(job, untied) if shares is None else _write_on_all_ranks(job, shares, untied))


def _link_frozen_files(job: SaveJob) -> list[FileRecord]:
    """Find the frozen files that are there already, and on rank 0 put them in place; their records. Collective."""
    offers, stage = job.answers[0]["offers"], job.prepared.stage
    if not offers:
        return []
    shares = reuse_frozen.frozen_shares(job.prepared.plans, job.ranks.size)
    job.taken.update(reuse_frozen.equal_files(shares, offers, job.ranks, job.config.bucket_bytes))
    return [] if stage is None else reuse_frozen.place_equal_files(shares, job.taken, stage)


def _write_on_rank_0(job: SaveJob, untied: list[tuple[Source, Source]]) -> list[FileRecord]:
    """All tensors come to rank 0, which writes them."""
    plans, config, stage = job.unlinked_plans, job.config, job.prepared.stage
    total = sum(one.size_bytes for one in plans)
    feed = track_progress(
        file_pieces(plans, job.ranks, config.bucket_bytes, config.nonfinite), total, "saving", job.ranks.shows
    )
    if stage is None:
        for _ in feed:
            pass
        return []
    _refuse_untied(untied)
    with _make_writer(job) as writer:
        return list(write_files([file for one in plans for file in one.files], feed, stage, writer))


def _make_writer(job: SaveJob) -> Writer:
    config = job.config
    return Writer(tuning_for(config.io_threads, config.direct_io, config.io_block_bytes))


def _create_shared_files(job: SaveJob) -> list[write_shards.Share] | None:
    """Make the files for all ranks to write into, if that pays and they all see them; None: rank 0 writes."""
    config, told = job.config, job.answers[0]
    plain = all(format_named(one.format).is_plain for one in job.prepared.plans) and config.compression is None
    if job.ranks.size == 1 or config.each_rank_writes == "off" or not plain or config.nonfinite == "raise":
        return None
    if any(answer["state_dict"] for answer in job.answers):
        return None
    shares = write_shards.divide_files(job.unlinked_plans, job.ranks.size)
    if config.each_rank_writes == "auto" and not write_shards.is_worth_sharing(shares):
        return None

    def open_files() -> None:
        for share in shares if job.prepared.stage is not None else ():
            write_shards.allocate_file(share, Path(told["stage"]))

    _, error = try_action(open_files)
    if all_ranks_see(Path(told["stage"]), job.ranks, error):
        return shares
    for share in shares if job.prepared.stage is not None else ():
        (Path(told["stage"]) / share.file.path).unlink()
    return None


def all_ranks_see(folder: Path, ranks: Ranks, error: BaseException | None = None) -> bool:
    """Whether all ranks see what rank 0 makes in `folder`: each looks for a word it leaves there. Collective.

    Raises `error`, or that of rank 0 if it cannot write there, on all ranks.
    """
    probe, word = folder / f"{_PROBE}-{uuid.uuid4().hex}", uuid.uuid4().hex

    def leave_probe() -> None:
        if ranks.leads:
            folder.mkdir(parents=True, exist_ok=True)
            probe.write_text(word)

    if error is None:
        _, error = try_action(leave_probe)
    told = ranks.agree("the files of save()", {"path": str(probe), "word": word}, error)[0]
    seen = Path(told["path"]).is_file() and Path(told["path"]).read_text() == told["word"]
    votes = ranks.agree("the look at the files of save()", {"sees": seen})
    if ranks.leads:
        probe.unlink(missing_ok=True)
    return all(vote["sees"] for vote in votes)


def _write_on_all_ranks(
    job: SaveJob, shares: list[write_shards.Share], untied: list[tuple[Source, Source]]
) -> list[FileRecord]:
    """Every rank writes what it holds; the records are rank 0's to keep."""
    stage, config = Path(job.answers[0]["stage"]), job.config

    _refuse_untied(untied)
    with _make_writer(job) as writer:
        digests = [
            write_shards.write_own_bytes(share, stage, job.ranks, writer, config.bucket_bytes) for share in shares
        ]
    answers = job.ranks.agree("the writing of save()", {"digests": digests})
    return [
        write_shards.file_record(share, [answer["digests"][number] for answer in answers])
        for number, share in enumerate(shares)
    ]


def _refuse_untied(pairs: list[tuple[Source, Source]]) -> None:
    if pairs:
        names = ", ".join(f"{one.name} and {other.name}" for one, other in pairs)
        raise IncompleteError(
            f"{names}: the model's config ties them, but their values differ; call model.tie_weights(), or set "
            "config.tie_word_embeddings=False to keep both"
        )
