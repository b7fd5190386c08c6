"""One save, from the request to the commit: the road out, the same for every caller.

Three steps, each ended by an agreement of all ranks: choose and check (nothing moves), move and write, commit.
"""

import logging
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from ft_ckpt.checkpoint import commit
from ft_ckpt.checkpoint.catalog import checkpoint_bytes
from ft_ckpt.config import SaverConfig, human_size
from ft_ckpt.distributed.ranks import Ranks
from ft_ckpt.errors import NoSpaceError, RankError, RanksDisagreeError, explained
from ft_ckpt.files.objects import compress_file
from ft_ckpt.model.parts import kind_of
from ft_ckpt.saving import replicas, reuse_frozen
from ft_ckpt.saving.build_manifest import manifest_of
from ft_ckpt.saving.files import check_written_files, link_second_names
from ft_ckpt.saving.move_tensors import SaveJob, write_tensors
from ft_ckpt.saving.plan import SavePlan, SaveRequest, prepare_stage
from ft_ckpt.storage.digests import FileRecord, digest_of
from ft_ckpt.training.items import check_same_tensors

_LOG = logging.getLogger("ft_ckpt")


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


def run_save(
    request: SaveRequest | None,
    error: BaseException | None,
    ranks: Ranks,
    config: SaverConfig,
    begun: float,
    chosen: SavePlan | None = None,
) -> SaveReport:
    """Carry out `request`, or tell the other ranks of the `error` that there is instead. Collective.

    `begun` is when the call came, by `time.monotonic`; `chosen` what was chosen before, for this request. Raises what
    `CheckpointSaver.save` says.
    """
    tries, outcome = 0, _try_save(request, error, ranks, config, begun, chosen)
    while request is not None and outcome.keys() & {"full", "apart"}:
        if "apart" in outcome:  # to be laid out anew
            request, chosen = accept_differences(request, outcome["apart"], ranks, config), None
        else:  # the disk was filled by others meanwhile, and the saver was told not to give up
            tries += 1
        changed = frozenset(outcome.get("changed", ()))
        outcome = _try_save(request, None, ranks, config, begun, chosen, tries, changed)
    report = SaveReport(**{**outcome, "path": Path(outcome["path"]), "notes": tuple(outcome["notes"])})
    if ranks.leads:
        _LOG.info("saved %s: %s in %.2f s", report.path.name, human_size(report.bytes), report.seconds)
        for note in report.notes:
            _LOG.info("%s: %s", report.path.name, note)
    return report


def accept_differences(
    request: SaveRequest, apart: replicas.Differences, ranks: Ranks, config: SaverConfig
) -> SaveRequest:
    """The request that knows what ranks have come apart in. Raises RanksDisagreeError where that is refused."""
    if apart:
        report_differences(replicas.describe_differences(apart), str(request.target), ranks, config)
    return replace(request, apart=apart)


def report_differences(found: str, saved: str, ranks: Ranks, config: SaverConfig) -> None:
    """Refuse what ranks were `found` to have otherwise than others, or warn of it in what is `saved`, as configured.

    Raises RanksDisagreeError.
    """
    if config.on_difference == "raise":
        replicas.refuse_replica_differences(found)
    if config.on_difference == "warn" and ranks.shows:
        warnings.warn(f"{saved}: {found}, which is stored", stacklevel=5)


def _try_save(
    request: SaveRequest | None,
    error: BaseException | None,
    ranks: Ranks,
    config: SaverConfig,
    begun: float,
    chosen: SavePlan | None,
    tries: int = 0,
    changed: frozenset[str] = frozenset(),
) -> dict[str, Any]:
    """One try: what was committed, or on every rank {"apart": what ranks have come apart in} or {"full": why}.

    Of a full disk "changed" names the frozen files that no earlier checkpoint has.
    """
    prepared: SavePlan | None = None
    made: dict[str, replicas.ReplicaDigest] = {}
    try:
        if request is not None:
            prepared, error = ranks.attempt(
                explained(request.target)(lambda: prepare_stage(request, ranks, config, tries, chosen, changed))
            )
        if prepared is not None and compares_replicas(request, ranks):
            made, error = ranks.attempt(
                lambda: replicas.digest_replicas(replicas.replicated_tensors(prepared.plans), ranks.rank)
            )
            made = made or {}
        # Everything that can be refused is refused here, before a tensor moves: later, ranks depend on each other.
        answers = ranks.agree(
            "save()", _describe_request(request, prepared, made), error, same=("path", "kind", "step")
        )
        if len({answer["tensors"] for answer in answers}) > 1:
            check_same_tensors(
                [answer["names"] for answer in ranks.agree("the tensors of save()", _tensor_names(prepared))]
            )
        if request is None or prepared is None:
            raise RankError("save(): agreed on without a plan on this rank; please report it")
        _refuse_lonely_dicts(answers)
        if compares_replicas(request, ranks) and not answers[0]["state_dict"]:  # which was given on rank 0 alone
            apart = replicas.differing_replicas(made, [answer["replicas"] for answer in answers], ranks)
            if apart:
                return {"apart": apart}
        job = SaveJob(request, prepared, tuple(answers), ranks, config, begun)
        report, error = ranks.attempt(explained(request.target)(lambda: _write_and_commit(job)))
        if isinstance(error, NoSpaceError) and config.when_full != "raise":
            report, error = {"full": str(error), "changed": [*changed, *(prepared.offers.keys() - job.taken)]}, None
        return ranks.agree("the commit of save()", report, error)[0]
    finally:
        if prepared is not None and prepared.stage is not None:
            commit.discard_stage(prepared.stage)


def _tensor_names(prepared: SavePlan | None) -> dict[str, list[str]]:
    plans = () if prepared is None else prepared.plans
    return {"names": [f"{one.part.path}/{e.name}".lstrip("/") for one in plans for e in one.part.entries]}


def compares_replicas(request: SaveRequest | None, ranks: Ranks) -> bool:
    """Whether what all ranks hold has yet to be compared for this request."""
    return ranks.size > 1 and request is not None and request.apart is None and not request.state_dict_given


def _describe_request(
    request: SaveRequest | None, prepared: SavePlan | None, made: Mapping[str, replicas.ReplicaDigest]
) -> dict[str, Any]:
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
        "offers": reuse_frozen.offers_to_json(prepared.offers),
        "replicas": replicas.digests_by_place(made),
    }


def _refuse_lonely_dicts(answers: list[dict[str, Any]]) -> None:
    """Rank 0 writes: a state dict that others were handed and it was not leaves it waiting for tensors."""
    given = [str(rank) for rank, answer in enumerate(answers) if answer["state_dict"]]
    if given and not answers[0]["state_dict"]:
        raise RanksDisagreeError(
            f"state_dict= was given on rank(s) {', '.join(given)} and not on rank 0, which writes it; give it on rank 0"
        )


def _write_and_commit(job: SaveJob) -> dict[str, Any]:
    """Write the files, compare them with the model, commit. Collective; the result is rank 0's."""
    if not job.ranks.leads and job.answers[0]["state_dict"]:
        return {}  # rank 0 was handed everything; a gather leaves the others with {} or None, which says nothing
    files, stage = write_tensors(job), job.prepared.stage
    return {} if stage is None else _commit_files(job, stage, files)


def _commit_files(job: SaveJob, stage: Path, files: list[FileRecord]) -> dict[str, Any]:
    """Compare the files with the model, and commit."""
    request, plans, compression = job.request, job.prepared.plans, job.config.compression
    settings = replicas.differing_settings(request.captured.document)
    files = files + [link for one in plans for link in link_second_names(one, files, stage)]
    for one in plans:
        check_written_files(one, stage)
    if compression is not None:
        files = [_compress_in_place(file, stage, compression) for file in files]
    manifest = manifest_of(
        stage,
        plans,
        files,
        job.answers,
        compressed=compression is not None,
        bases=job.prepared.companions.bases,
        notes=[replicas.difference_note(settings, True)] if settings else [],
        kind=kind_of(request.adapter_only, request.attribute),
        step=request.step,
        metrics=request.metrics,
        world={"size": job.ranks.size, "engine": job.prepared.engine},
        run_id=request.run_id,
        rankings=job.config.rankings,
        export=request.run_id is not None and request.captured.state is None,
    )
    commit.commit_stage(stage, request.target, manifest)
    return {
        "path": str(request.target),
        "kind": manifest.kind,
        "bytes": checkpoint_bytes(request.target, manifest),
        "tensors": sum(len(part.tensors) for part in manifest.parts),
        "seconds": time.monotonic() - job.begun,
        "casts": _add_counts([part.casts for part in manifest.parts]),
        "notes": list(manifest.notes),
    }


def _compress_in_place(file: FileRecord, stage: Path, compression: str) -> FileRecord:
    """The file's record once it is compressed in place: sizes are known only afterwards, so this is a second pass."""
    path = stage / file.path
    compress_file(path, compression)
    return FileRecord(file.path, path.stat().st_size, digest_of(path))


def _add_counts(counts: list[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for count in counts:
        for key, number in count.items():
            total[key] = total.get(key, 0) + number
    return total
