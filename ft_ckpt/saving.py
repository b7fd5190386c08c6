"""One save, from the request to the commit: the road out, the same for every caller.

Three steps, each ended by an agreement of all ranks: choose and check (nothing moves), move and write, commit.
"""

import logging
import time
import uuid
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import xxhash

from ft_ckpt import commit, direct, engines, replicas, reuse
from ft_ckpt.catalog import size_of
from ft_ckpt.config import SaverConfig, human_size
from ft_ckpt.deliver import PartPlan, check_written, pieces, second_names
from ft_ckpt.digests import digest_of
from ft_ckpt.errors import IncompleteError, NoSpaceError, RankError, RanksDisagreeError, explained
from ft_ckpt.gather import equal
from ft_ckpt.items import check_names
from ft_ckpt.manifest import FileRecord
from ft_ckpt.objects import compress_file
from ft_ckpt.pace import pace_of
from ft_ckpt.parts import kind_of
from ft_ckpt.preparing import Prepared, Request, prepare
from ft_ckpt.progress import tracked
from ft_ckpt.ranks import Ranks, attempt
from ft_ckpt.records import manifest_of
from ft_ckpt.write import Writer, write_files

_LOG = logging.getLogger("ft_ckpt")
_PROBE = ".ft_ckpt-probe"


@dataclass(frozen=True)
class SaveReport:
    """What a save committed, the same on every rank."""

    path: Path
    kind: str  # "full" | "adapter" | "attribute"
    bytes: int  # of all files; one that goes by two names counts once
    tensors: int
    seconds: float  # from the call to the commit, synced
    casts: Mapping[str, int]  # "float32->bfloat16": number of tensors
    notes: tuple[str, ...]


def run(
    request: Request | None,
    error: BaseException | None,
    ranks: Ranks,
    config: SaverConfig,
    begun: float,
    chosen: Prepared | None = None,
) -> SaveReport:
    """Carry out `request`, or tell the other ranks of the `error` that there is instead. Collective.

    `begun` is when the call came, by `time.monotonic`; `chosen` what was chosen before, for this request. Raises what
    `CheckpointSaver.save` says.
    """
    tries, outcome = 0, _once(request, error, ranks, config, begun, chosen)
    while request is not None and outcome.keys() & {"full", "apart"}:
        if "apart" in outcome:  # to be laid out anew
            request, chosen = settled(request, outcome["apart"], ranks, config), None
        else:  # the disk was filled by others meanwhile, and the saver was told not to give up
            tries += 1
        changed = frozenset(outcome.get("changed", ()))
        outcome = _once(request, None, ranks, config, begun, chosen, tries, changed)
    report = SaveReport(**{**outcome, "path": Path(outcome["path"]), "notes": tuple(outcome["notes"])})
    if ranks.leads:
        _LOG.info("saved %s: %s in %.2f s", report.path.name, human_size(report.bytes), report.seconds)
        for note in report.notes:
            _LOG.info("%s: %s", report.path.name, note)
    return report


def settled(request: Request, apart: replicas.Apart, ranks: Ranks, config: SaverConfig) -> Request:
    """The request that knows what ranks have come apart in. Raises RanksDisagreeError where that is refused."""
    if apart:
        tell_apart(replicas.described(apart), str(request.target), ranks, config)
    return replace(request, apart=apart)


def tell_apart(found: str, saved: str, ranks: Ranks, config: SaverConfig) -> None:
    """Refuse what ranks were `found` to have otherwise than others, or warn of it in what is `saved`, as configured.

    Raises RanksDisagreeError.
    """
    if config.on_difference == "raise":
        replicas.refuse(found)
    if config.on_difference == "warn" and ranks.shows:
        warnings.warn(f"{saved}: {found}, which is stored", stacklevel=5)


def _once(
    request: Request | None,
    error: BaseException | None,
    ranks: Ranks,
    config: SaverConfig,
    begun: float,
    chosen: Prepared | None,
    tries: int = 0,
    changed: frozenset[str] = frozenset(),
) -> dict[str, Any]:
    """One try: what was committed, or on every rank {"apart": what ranks have come apart in} or {"full": why}.

    Of a full disk "changed" names the frozen files that no earlier checkpoint has.
    """
    prepared: Prepared | None = None
    made: dict[str, replicas.Digest] = {}
    try:
        if request is not None:
            prepared, error = ranks.attempt(
                explained(request.target)(lambda: prepare(request, ranks, config, tries, chosen, changed))
            )
        if prepared is not None and compares(request, ranks):
            made, error = ranks.attempt(lambda: replicas.digests(replicas.of_plans(prepared.plans), ranks.rank))
            made = made or {}
        # Everything that can be refused is refused here, before a tensor moves: later, ranks depend on each other.
        answers = ranks.agree("save()", _facts(request, prepared, made), error, same=("path", "kind", "step"))
        if len({answer["tensors"] for answer in answers}) > 1:
            check_names([answer["names"] for answer in ranks.agree("the tensors of save()", _names(prepared))])
        if request is None or prepared is None:
            raise RankError("save(): agreed on without a plan on this rank; please report it")
        _refuse_lonely_dicts(answers)
        if compares(request, ranks) and not answers[0]["state_dict"]:  # which was given on rank 0 alone
            apart = replicas.differing(made, [answer["replicas"] for answer in answers], ranks)
            if apart:
                return {"apart": apart}
        job = _Job(request, prepared, tuple(answers), ranks, config, begun)
        report, error = ranks.attempt(explained(request.target)(lambda: _carry_out(job)))
        if isinstance(error, NoSpaceError) and config.when_full != "raise":
            report, error = {"full": str(error), "changed": [*changed, *(prepared.offers.keys() - job.taken)]}, None
        return ranks.agree("the commit of save()", report, error)[0]
    finally:
        if prepared is not None and prepared.stage is not None:
            commit.discard(prepared.stage)


def _names(prepared: Prepared | None) -> dict[str, list[str]]:
    plans = () if prepared is None else prepared.plans
    return {"names": [f"{one.part.path}/{e.name}".lstrip("/") for one in plans for e in one.part.entries]}


def compares(request: Request | None, ranks: Ranks) -> bool:
    """Whether what all ranks hold has yet to be compared for this request."""
    return ranks.size > 1 and request is not None and request.apart is None and not request.state_dict_given


def _facts(request: Request | None, prepared: Prepared | None, made: Mapping[str, replicas.Digest]) -> dict[str, Any]:
    """What every rank must see alike, and what rank 0 wants to know of each."""
    if request is None or prepared is None:
        return {}
    names = repr([(f.path, f.layout.specs) for one in prepared.plans for f in one.files])
    return {
        "path": str(request.target),
        "kind": kind_of(request.adapter_only, request.attribute),
        "step": request.step,
        "tensors": xxhash.xxh3_64_hexdigest(names.encode()),
        "state_dict": request.state_dict_given,
        "samples": prepared.samples,
        "stage": None if prepared.stage is None else str(prepared.stage),
        "offers": reuse.to_json(prepared.offers),
        "replicas": replicas.told(made),
    }


def _refuse_lonely_dicts(answers: list[dict[str, Any]]) -> None:
    """Rank 0 writes: a state dict that others were handed and it was not leaves it waiting for tensors."""
    given = [str(rank) for rank, answer in enumerate(answers) if answer["state_dict"]]
    if given and not answers[0]["state_dict"]:
        raise RanksDisagreeError(
            f"state_dict= was given on rank(s) {', '.join(given)} and not on rank 0, which writes it; give it on rank 0"
        )


@dataclass(frozen=True, eq=False)
class _Job:
    """A save that all ranks have agreed to."""

    request: Request
    prepared: Prepared
    answers: tuple[dict[str, Any], ...]
    ranks: Ranks
    config: SaverConfig
    begun: float
    taken: dict[str, str] = field(default_factory=dict)  # once known: digests of the files that are there, by path

    @property
    def plans(self) -> tuple[PartPlan, ...]:
        """The files that are to be written."""
        return reuse.to_write(self.prepared.plans, self.taken)


def _carry_out(job: _Job) -> dict[str, Any]:
    """Move and write the tensors, compare the files with the model, commit. Collective; the result is rank 0's."""
    if not job.ranks.leads and job.answers[0]["state_dict"]:
        return {}  # rank 0 was handed everything; a gather leaves the others with {} or None, which says nothing
    pairs = job.prepared.ties_to_check
    untied = [pair for pair in pairs if not equal(*pair, job.ranks, job.config.bucket_bytes)]
    stage = job.prepared.stage
    linked = _linked(job)
    shares = _open_to_all(job)
    written = _gathered(job, untied) if shares is None else _from_all(job, shares, untied)
    return {} if stage is None else _sealed(job, stage, linked + written)


def _linked(job: _Job) -> list[FileRecord]:
    """Find the frozen files that are there already, and on rank 0 put them in place; their records. Collective."""
    offers, stage = job.answers[0]["offers"], job.prepared.stage
    if not offers:
        return []
    shares = reuse.frozen_shares(job.prepared.plans, job.ranks.size)
    job.taken.update(reuse.equal_files(shares, offers, job.ranks, job.config.bucket_bytes))
    return [] if stage is None else reuse.settle(shares, job.taken, stage)


def _gathered(job: _Job, untied: list[tuple[engines.Source, engines.Source]]) -> list[FileRecord]:
    """All tensors come to rank 0, which writes them."""
    plans, config, stage = job.plans, job.config, job.prepared.stage
    total = sum(one.size_bytes for one in plans)
    feed = tracked(pieces(plans, job.ranks, config.bucket_bytes, config.nonfinite), total, "saving", job.ranks.shows)
    if stage is None:
        for _ in feed:
            pass
        return []
    _refuse_untied(untied)
    with _writer(job, stage, total) as writer:
        return list(write_files([file for one in plans for file in one.files], feed, stage, writer))


def _writer(job: _Job, stage: Path, size_bytes: int) -> Writer:
    config = job.config
    return Writer(pace_of(stage, size_bytes, config.io_threads, config.direct_io, config.io_block_bytes))


def _open_to_all(job: _Job) -> list[direct.Share] | None:
    """Make the files for all ranks to write into, if that pays and they all see them; None: rank 0 writes."""
    config, told = job.config, job.answers[0]
    plain = all(one.format == "safetensors" for one in job.prepared.plans) and config.compression is None
    if job.ranks.size == 1 or config.each_rank_writes == "off" or not plain or config.nonfinite == "raise":
        return None
    if any(answer["state_dict"] for answer in job.answers):
        return None
    shares = direct.shares(job.plans, job.ranks.size)
    if config.each_rank_writes == "auto" and not direct.pays(shares):
        return None

    def open_files() -> None:
        for share in shares if job.prepared.stage is not None else ():
            direct.create(share, Path(told["stage"]))

    _, error = attempt(open_files)
    if all_see(Path(told["stage"]), job.ranks, error):
        return shares
    for share in shares if job.prepared.stage is not None else ():
        (Path(told["stage"]) / share.file.path).unlink()
    return None


def all_see(folder: Path, ranks: Ranks, error: BaseException | None = None) -> bool:
    """Whether all ranks see what rank 0 makes in `folder`: each looks for a word it leaves there. Collective.

    Raises `error`, or that of rank 0 if it cannot write there, on all ranks.
    """
    probe, word = folder / f"{_PROBE}-{uuid.uuid4().hex}", uuid.uuid4().hex

    def leave() -> None:
        if ranks.leads:
            folder.mkdir(parents=True, exist_ok=True)
            probe.write_text(word)

    if error is None:
        _, error = attempt(leave)
    told = ranks.agree("the files of save()", {"path": str(probe), "word": word}, error)[0]
    seen = Path(told["path"]).is_file() and Path(told["path"]).read_text() == told["word"]
    votes = ranks.agree("the look at the files of save()", {"sees": seen})
    if ranks.leads:
        probe.unlink(missing_ok=True)
    return all(vote["sees"] for vote in votes)


def _from_all(
    job: _Job, shares: list[direct.Share], untied: list[tuple[engines.Source, engines.Source]]
) -> list[FileRecord]:
    """Every rank writes what it holds; the records are rank 0's to keep."""
    stage, config = Path(job.answers[0]["stage"]), job.config

    _refuse_untied(untied)
    with _writer(job, stage, sum(one.size_bytes for one in job.plans) // job.ranks.size) as writer:
        digests = [direct.write(share, stage, job.ranks, writer, config.bucket_bytes) for share in shares]
    answers = job.ranks.agree("the writing of save()", {"digests": digests})
    return [
        direct.record(share, [answer["digests"][number] for answer in answers]) for number, share in enumerate(shares)
    ]


def _sealed(job: _Job, stage: Path, written: list[FileRecord]) -> dict[str, Any]:
    """Compare the files with the model, and commit."""
    request, plans, compression = job.request, job.prepared.plans, job.config.compression
    settings = replicas.settings_apart(request.captured.document)
    written = written + [link for one in plans for link in second_names(one, written, stage)]
    for one in plans:
        check_written(one, stage)
    if compression is not None:
        written = [_compressed(file, stage, compression) for file in written]
    manifest = manifest_of(
        stage,
        plans,
        written,
        job.answers,
        compressed=compression is not None,
        bases=job.prepared.companions.bases,
        notes=[replicas.note_of(settings, True)] if settings else [],
        kind=kind_of(request.adapter_only, request.attribute),
        step=request.step,
        metrics=request.metrics,
        world={"size": job.ranks.size, "engine": job.prepared.engine},
        run_id=request.run_id,
        rankings=job.config.rankings,
        export=request.run_id is not None and request.captured.state is None,
    )
    commit.commit(stage, request.target, manifest)
    return {
        "path": str(request.target),
        "kind": manifest.kind,
        "bytes": size_of(request.target, manifest),
        "tensors": sum(len(part.tensors) for part in manifest.parts),
        "seconds": time.monotonic() - job.begun,
        "casts": _summed([part.casts for part in manifest.parts]),
        "notes": list(manifest.notes),
    }


def _compressed(file: FileRecord, stage: Path, compression: str) -> FileRecord:
    """The file's record once it is compressed in place: sizes are known only afterwards, so this is a second pass."""
    path = stage / file.path
    compress_file(path, compression)
    return FileRecord(file.path, path.stat().st_size, digest_of(path))


def _refuse_untied(pairs: list[tuple[engines.Source, engines.Source]]) -> None:
    if pairs:
        names = ", ".join(f"{one.name} and {other.name}" for one, other in pairs)
        raise IncompleteError(
            f"{names}: the model's config ties them, but their values differ; call model.tie_weights(), or set "
            "config.tie_word_embeddings=False to keep both"
        )


def _summed(counts: list[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for count in counts:
        for key, number in count.items():
            total[key] = total.get(key, 0) + number
    return total
