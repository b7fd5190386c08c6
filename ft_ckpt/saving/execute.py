"""One save from the request to the commit: the steps that every caller takes.

Three steps, each ended by an agreement of all ranks: choose and check (nothing moves), move and write, commit.
"""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from ft_ckpt.checkpoint.checks import stored_bytes
from ft_ckpt.checkpoint.staging import Staging
from ft_ckpt.config import SaverConfig, human_size
from ft_ckpt.distributed.agreement import Values
from ft_ckpt.distributed.ranks import Ranks
from ft_ckpt.errors import NoSpaceError, RanksDisagreeError, explained
from ft_ckpt.formats.registry import format_named
from ft_ckpt.formats.safetensors_file import link_second_names
from ft_ckpt.messages import LOG, warn
from ft_ckpt.model.objects import compress_file
from ft_ckpt.model.parts import kind_of
from ft_ckpt.saving import replicas
from ft_ckpt.saving.files import check_written_files
from ft_ckpt.saving.plan import BaseSamples, SavePlan, SaveRequest, manifest_of, plan_save
from ft_ckpt.saving.reuse_frozen import Offer
from ft_ckpt.saving.write import SaveJob, SharedFolders, StagedSave, prepare_stage, write_tensors, written_files
from ft_ckpt.storage.digests import FileRecord, read_record
from ft_ckpt.storage.place import Place, open_place
from ft_ckpt.storage.scratch import local_folder
from ft_ckpt.storage.store import SharedStore, Store
from ft_ckpt.training.items import name_differing_tensors
from ft_ckpt.transfer.push import PendingPush


@dataclass(frozen=True)
class SaveReport:
    """A finished save: its folder, its size and the saver's decisions. The same on every rank, but what sends it."""

    path: Path | str
    """The committed folder; its URL where it is in a bucket."""
    kind: str
    """ "full", "adapter", "attribute" or "state"."""
    bytes: int
    """Size of all files, in bytes; one that goes by two names counts once."""
    tensors: int
    """Number of stored tensors."""
    seconds: float
    """From the call to the commit, synced."""
    casts: Mapping[str, int]
    """Number of tensors for each cast, such as "float32->bfloat16"."""
    notes: tuple[str, ...]
    """What the saver decided and a reader should know."""
    step: int | None
    """The step that it is of."""
    push: PendingPush | None = None
    """The push to the Hub that was asked for with the save; on rank 0 alone."""
    upload: PendingPush | None = None
    """Its way from the staging folder to the bucket, if it takes that; on rank 0 alone."""
    target: Place | None = field(default=None, repr=False, compare=False)

    @property
    def place(self) -> Place:
        """The committed folder as functions of ft_ckpt take it, with the client of its bucket."""
        return open_place(self.path) if self.target is None else self.target


def run_save(
    request: SaveRequest | None,
    error: BaseException | None,
    ranks: Ranks,
    config: SaverConfig,
    begun: float,
    plan: SavePlan | None,
    shared: SharedFolders,
) -> SaveReport:
    """Carry out `request`, or pass on to the other ranks the `error` that there is instead. Collective.

    `begun` is the time of the call, by `time.monotonic`; `plan` the plan made before, if there is one; `shared` caches
    which folders all ranks see. Raises what `CheckpointSaver.save` says.
    """
    changed: frozenset[str] = frozenset()  # frozen files that no earlier checkpoint has, as earlier tries found
    tries = 0
    while True:
        staged: StagedSave | None = None
        try:
            if request is not None:
                stage = partial(_plan_and_stage, request, plan, ranks, config, tries, changed)
                staged, error = ranks.attempt(explained(request.target)(stage))
            # Everything that can be refused is refused here, before a tensor moves: later, ranks depend on each other.
            job, samples, apart = _agree_on_plan(request, staged, ranks, config, shared, error)
            if apart is not None:  # to be laid out anew
                request, plan = accept_differences(job.request, apart, ranks, config), None
                continue
            report = _write_and_commit(job, samples, begun)
        except BaseException:
            shared.forget()
            raise
        finally:
            if staged is not None and staged.staging is not None:
                staged.staging.discard()
        if report is not None:
            return report
        # Other programs have filled the disk meanwhile, and the settings say to try again.
        changed, tries = changed | (job.offers.keys() - job.taken), tries + 1


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
        warn(f"{saved}: {found}, which is stored", stacklevel=5)


def _plan_and_stage(
    request: SaveRequest, plan: SavePlan | None, ranks: Ranks, config: SaverConfig, tries: int, changed: frozenset[str]
) -> StagedSave:
    return prepare_stage(request, plan or plan_save(request, ranks, config), ranks, config, tries, changed)


def _agree_on_plan(
    request: SaveRequest | None,
    staged: StagedSave | None,
    ranks: Ranks,
    config: SaverConfig,
    shared: SharedFolders,
    error: BaseException | None,
) -> tuple[SaveJob, tuple[BaseSamples, ...], replicas.Differences | None]:
    """Compare the plans of all ranks: the job, on rank 0 every rank's samples, and replicas that differ, if any do.

    Raises RanksDisagreeError naming tensors.
    """
    compares = compares_replicas(request, ranks)
    digests: dict[str, replicas.ReplicaDigest] = {}
    if staged is not None and compares:
        held = replicas.replicated_tensors(staged.plan.plans)
        made, error = ranks.attempt(partial(replicas.digest_replicas, held, ranks.rank))
        digests = made or {}
    facts = {} if request is None or staged is None or error else _describe_save(request, staged, digests)
    agreed = ranks.agree("save()", facts, error, same=("path", "kind", "step"), decide=_terms_of)
    assert request is not None, "the agreement has raised the error"
    assert staged is not None, "the agreement has raised the error"
    terms = agreed.told
    if not terms["alike"]:
        name_differing_tensors(ranks, "the tensors of save()", facts["tensors"], lambda: _tensor_names(staged.plan))
    apart: replicas.Differences | None = None
    if compares and not terms["state_dict"] and not terms["replicas_alike"]:  # a state dict is given on rank 0 alone
        apart = replicas.differing_replicas(digests, ranks) or None
    offers = {path: Offer(count, tuple(digests)) for path, (count, digests) in terms["offers"].items()}
    job = SaveJob(
        request, staged.plan, staged.staging, terms["stage"], offers, terms["state_dict"], ranks, config, shared
    )
    job.companions = staged.files
    return job, tuple(value["samples"] for value in agreed.values), apart


def _describe_save(
    request: SaveRequest, staged: StagedSave, digests: Mapping[str, replicas.ReplicaDigest]
) -> dict[str, Any]:
    """The facts of a save that ranks compare, and those that rank 0 needs of each, as JSON."""
    names = repr([(f.path, [*map(tuple, f.layout.specs)]) for one in staged.plan.plans for f in one.files])
    return {
        "path": str(request.target),
        "kind": "merged" if request.merged else kind_of(request.adapter_only, request.attribute),
        "step": request.step,
        "tensors": xxhash.xxh3_64_hexdigest(names.encode()),  # names, shapes and dtypes in all files
        "state_dict": request.state_dict_given,
        "samples": staged.plan.samples,
        "stage": _shared_stage(staged.staging),
        "offers": {path: [offer.ranks, offer.digests] for path, offer in staged.offers.items()},
        "replicas": replicas.digests_by_place(digests),
    }


def _terms_of(facts: Values) -> dict[str, Any]:
    _refuse_lonely_dicts(facts)
    return {
        **{key: facts[0][key] for key in ("stage", "offers", "state_dict")},
        "alike": all(one["tensors"] == facts[0]["tensors"] for one in facts),
        "replicas_alike": replicas.are_alike(one["replicas"] for one in facts),
    }


def _tensor_names(plan: SavePlan) -> tuple[str, ...]:
    return tuple(f"{one.part.path}/{e.name}".lstrip("/") for one in plan.plans for e in one.part.entries)


def compares_replicas(request: SaveRequest | None, ranks: Ranks) -> bool:
    """Whether what all ranks hold has yet to be compared for this request."""
    return ranks.size > 1 and request is not None and request.apart is None and not request.state_dict_given


def _shared_stage(staging: Staging | None) -> str | None:
    """The folder in which ranks may write files together, if there is one."""
    return staging.store.url if staging is not None and isinstance(staging.store, SharedStore) else None


def _refuse_lonely_dicts(facts: Values) -> None:
    """Rank 0 writes: a state dict that others were handed and it was not leaves it waiting for tensors."""
    given = [str(rank) for rank, one in enumerate(facts) if one["state_dict"]]
    if given and not facts[0]["state_dict"]:
        raise RanksDisagreeError(
            f"state_dict= was given on rank(s) {', '.join(given)} and not on rank 0, which writes it; give it on rank 0"
        )


def _write_and_commit(job: SaveJob, samples: tuple[BaseSamples, ...], begun: float) -> SaveReport | None:
    """Write the files, compare them with the model, commit: the report, or None where the disk is full. Collective.

    A full disk is an error unless the settings say to make room and try again.
    """
    request, ranks, retries = job.request, job.ranks, job.config.when_full != "raise"
    written: dict[str, Any] | None = {}
    error: BaseException | None = None
    if ranks.leads or not job.state_dict:  # a gather that made the dict leaves other ranks with {} or None
        written, error = ranks.attempt(explained(request.target)(partial(write_tensors, job)))
    is_full = retries and isinstance(error, NoSpaceError)

    def commit(values: Values) -> dict[str, Any] | None:
        if any(value["full"] for value in values):
            return None
        try:
            return explained(request.target)(lambda: _commit_files(job, written_files(job, values), samples))()
        except NoSpaceError:
            if retries:
                return None
            raise

    value = {"full": is_full, **(written or {})}
    saved = ranks.agree("the commit of save()", value, None if is_full else error, decide=commit).told
    if saved is None:
        return None
    report = SaveReport(
        request.target.location,
        **{**saved, "notes": tuple(saved["notes"])},
        seconds=time.monotonic() - begun,
        target=request.target,
    )
    if ranks.leads:
        LOG.info("saved %s: %s in %.2f s", request.target.last_step, human_size(report.bytes), report.seconds)
        for note in report.notes:
            LOG.info("%s: %s", request.target.last_step, note)
    return report


def _commit_files(job: SaveJob, files: list[FileRecord], samples: tuple[BaseSamples, ...]) -> dict[str, Any]:
    """On rank 0: compare the files with the model, and commit. Fields of the report, as JSON."""
    request, plan, staging = job.request, job.plan, job.staging
    assert staging is not None, "rank 0 has the staging"
    store, compression = staging.store, job.config.compression
    settings = replicas.differing_settings({} if request.captured is None else request.captured.document)
    for one in plan.plans:
        paths = {file.path for file in one.files}
        files = files + link_second_names(format_named(one.format), [f for f in files if f.path in paths], store)
    for one in plan.plans:
        check_written_files(one, store)
    notes = [replicas.difference_note(settings, True)] if settings else []
    if request.check is not None:
        with local_folder(Place(store)) as folder:
            notes.append(request.check.compare(folder))
    if compression is not None:
        files = [_compress_in_place(file, store, compression) for file in files]
    manifest = manifest_of(
        plan.plans,
        [*files, *job.companions],
        samples,
        compressed=compression is not None,
        bases=plan.companions.bases,
        classes=plan.companions.classes,
        notes=notes,
        kind=kind_of(request.adapter_only, request.attribute),
        step=request.step,
        metrics=request.metrics,
        world={"size": job.ranks.size, "engine": plan.engine},
        run_id=request.run_id,
        rankings=job.config.rankings,
        export=bool(request.made_from) or (request.run_id is not None and not _has_state(request)),
        made_from=request.made_from,
    )
    size_bytes = stored_bytes(store, manifest)
    staging.commit(manifest)
    return {
        "kind": manifest.kind,
        "bytes": size_bytes,
        "tensors": sum(len(part.tensors) for part in manifest.parts),
        "casts": dict(sum((Counter(part.casts) for part in manifest.parts), Counter[str]())),
        "notes": manifest.notes,
        "step": manifest.step,
    }


def _has_state(request: SaveRequest) -> bool:
    return request.captured is not None and request.captured.state is not None


def _compress_in_place(file: FileRecord, store: Store, compression: str) -> FileRecord:
    """The file's record once it is compressed in place: sizes are known only afterwards, so this is a second pass."""
    compress_file(Place(store, file.path), compression)
    return read_record(store, file.path)
