"""One save, from the request to the commit: the road out, the same for every caller.

Three steps, each ended by an agreement of all ranks: choose and check (nothing moves), move and write, commit.
"""

import logging
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import xxhash

from ft_ckpt.checkpoint.checks import stored_bytes
from ft_ckpt.checkpoint.staging import Staging
from ft_ckpt.config import SaverConfig, human_size
from ft_ckpt.distributed.ranks import Ranks
from ft_ckpt.errors import NoSpaceError, RanksDisagreeError, explained
from ft_ckpt.files.objects import compress_file
from ft_ckpt.formats.registry import format_named
from ft_ckpt.formats.shard_files import link_second_names
from ft_ckpt.model.parts import kind_of
from ft_ckpt.saving import replicas
from ft_ckpt.saving.build_manifest import manifest_of
from ft_ckpt.saving.files import check_written_files
from ft_ckpt.saving.move_tensors import SaveFacts, SaveJob, SaveTerms, SharedFolders, write_tensors
from ft_ckpt.saving.plan import SavePlan, plan_save
from ft_ckpt.saving.request import SaveRequest
from ft_ckpt.saving.stage import StagedSave, prepare_stage
from ft_ckpt.storage.digests import FileRecord, read_record
from ft_ckpt.storage.local_copy import local_folder
from ft_ckpt.storage.place import Place, open_place
from ft_ckpt.storage.scratch import edited_object
from ft_ckpt.storage.store import SharedStore, Store
from ft_ckpt.training.exchange import decide_together, hear_leader
from ft_ckpt.training.items import name_differing_tensors
from ft_ckpt.transfer.pushes import PendingPush

_LOG = logging.getLogger("ft_ckpt")


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
    changed: frozenset[str] = frozenset()
    tries = 0
    while True:
        try:
            outcome = _try_save(request, error, ranks, config, begun, plan, shared, tries, changed)
        except BaseException:
            shared.forget()
            raise
        assert request is not None, "the first meeting has raised the error"
        if outcome.saved is not None:
            break
        if outcome.differences is not None:  # to be laid out anew
            request, plan = accept_differences(request, outcome.differences, ranks, config), None
        else:  # other programs have filled the disk meanwhile, and the settings say to try again
            changed, tries = frozenset(outcome.changed), tries + 1
    report = SaveReport(request.target.location, **vars(outcome.saved), target=request.target)
    if ranks.leads:
        _LOG.info("saved %s: %s in %.2f s", request.target.last_step, human_size(report.bytes), report.seconds)
        for note in report.notes:
            _LOG.info("%s: %s", request.target.last_step, note)
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


@dataclass(frozen=True)
class _Saved:
    """What was committed: the fields of a SaveReport but the path."""

    kind: str
    bytes: int
    tensors: int
    seconds: float
    casts: Mapping[str, int]
    notes: tuple[str, ...]
    step: int | None


@dataclass(frozen=True)
class _Outcome:
    """What a try came to, rank 0's on every rank; with nothing `saved` there is to be another one."""

    saved: _Saved | None = None
    changed: tuple[str, ...] = ()  # where the disk had no room: the frozen files that no earlier checkpoint has
    differences: Mapping[str, Mapping[int, str | None]] | None = None  # what ranks hold otherwise than others


def _try_save(
    request: SaveRequest | None,
    error: BaseException | None,
    ranks: Ranks,
    config: SaverConfig,
    begun: float,
    plan: SavePlan | None,
    shared: SharedFolders,
    tries: int,
    changed: frozenset[str],
) -> _Outcome:
    """One try; `tries` were made before, which found that no earlier checkpoint has the frozen files `changed`."""
    staged: StagedSave | None = None
    digests: dict[str, replicas.ReplicaDigest] = {}

    def stage(asked: SaveRequest) -> StagedSave:
        made = plan or plan_save(asked, ranks, config)
        return prepare_stage(asked, made, ranks, config, tries, changed)

    try:
        if request is not None:
            staged, error = ranks.attempt(explained(request.target)(partial(stage, request)))
        compares = staged is not None and compares_replicas(request, ranks)
        if staged is not None and compares:
            held = replicas.replicated_tensors(staged.plan.plans)
            made, error = ranks.attempt(partial(replicas.digest_replicas, held, ranks.rank))
            digests = made or {}
        # Everything that can be refused is refused here, before a tensor moves: later, ranks depend on each other.
        terms, answers = _agree_on_plan(request, staged, digests, ranks, error)
        assert request is not None, "the agreement has raised the error"
        assert staged is not None, "the agreement has raised the error"
        if compares and not terms.state_dict and not terms.replicas_alike:  # a state dict is given on rank 0 alone
            apart = replicas.differing_replicas(digests, ranks)
            if apart:
                return _Outcome(differences=apart)
        samples = tuple(answer.samples for answer in answers)
        job = SaveJob(request, staged, terms, samples, ranks, config, begun, shared)
        outcome, error = ranks.attempt(explained(request.target)(lambda: _write_and_commit(job)))
        if isinstance(error, NoSpaceError) and config.when_full != "raise":
            outcome, error = _Outcome(changed=(*changed, *(staged.offers.keys() - job.taken))), None
        done: _Outcome = hear_leader(ranks, "the commit of save()", _Outcome, outcome, error)
        return done
    finally:
        if staged is not None and staged.staging is not None:
            staged.staging.discard()


def _agree_on_plan(
    request: SaveRequest | None,
    staged: StagedSave | None,
    made: Mapping[str, replicas.ReplicaDigest],
    ranks: Ranks,
    error: BaseException | None,
) -> tuple[SaveTerms, Sequence[SaveFacts]]:
    """Meet with the facts of the save; on rank 0 those of every rank, too. Raises RanksDisagreeError naming tensors."""
    facts = None if request is None or staged is None else _describe_save(request, staged, made)
    kinds, same = (SaveFacts, SaveTerms), ("path", "kind", "step")
    terms, answers = decide_together(ranks, "save()", facts, _terms_of, kinds, error, same)
    if staged is not None and facts is not None and not terms.alike:
        name_differing_tensors(ranks, "the tensors of save()", facts.tensors, lambda: _tensor_names(staged))
    return terms, answers


def _terms_of(answers: Sequence[SaveFacts]) -> SaveTerms:
    _refuse_lonely_dicts(answers)
    first = answers[0]
    alike = all(answer.tensors == first.tensors for answer in answers)
    same_parts = replicas.are_alike(answer.replicas for answer in answers)
    return SaveTerms(first.stage, first.offers, first.state_dict, alike, same_parts)


def _tensor_names(staged: StagedSave) -> tuple[str, ...]:
    return tuple(f"{one.part.path}/{e.name}".lstrip("/") for one in staged.plan.plans for e in one.part.entries)


def compares_replicas(request: SaveRequest | None, ranks: Ranks) -> bool:
    """Whether what all ranks hold has yet to be compared for this request."""
    return ranks.size > 1 and request is not None and request.apart is None and not request.state_dict_given


def _describe_save(request: SaveRequest, staged: StagedSave, made: Mapping[str, replicas.ReplicaDigest]) -> SaveFacts:
    """What every rank must see alike, and what rank 0 wants to know of each."""
    names = repr([(f.path, [*map(tuple, f.layout.specs)]) for one in staged.plan.plans for f in one.files])
    return SaveFacts(
        path=str(request.target),
        kind="merged" if request.merged else kind_of(request.adapter_only, request.attribute),
        step=request.step,
        tensors=xxhash.xxh3_64_hexdigest(names.encode()),
        state_dict=request.state_dict_given,
        samples=staged.plan.samples,
        stage=_shared_stage(staged.staging),
        offers=staged.offers,
        replicas=replicas.digests_by_place(made),
    )


def _shared_stage(staging: Staging | None) -> str | None:
    """The folder in which ranks may write files together, if there is one."""
    return staging.store.url if staging is not None and isinstance(staging.store, SharedStore) else None


def _refuse_lonely_dicts(answers: Sequence[SaveFacts]) -> None:
    """Rank 0 writes: a state dict that others were handed and it was not leaves it waiting for tensors."""
    given = [str(rank) for rank, answer in enumerate(answers) if answer.state_dict]
    if given and not answers[0].state_dict:
        raise RanksDisagreeError(
            f"state_dict= was given on rank(s) {', '.join(given)} and not on rank 0, which writes it; give it on rank 0"
        )


def _write_and_commit(job: SaveJob) -> _Outcome:
    """Write the files, compare them with the model, commit. Collective; the result is rank 0's."""
    if not job.ranks.leads and job.terms.state_dict:
        return _Outcome()  # rank 0 was handed everything; a gather leaves the others with {} or None
    files, staging = write_tensors(job), job.staged.staging
    return _Outcome() if staging is None else _Outcome(_commit_files(job, staging, files))


def _commit_files(job: SaveJob, staging: Staging, files: list[FileRecord]) -> _Saved:
    """Compare the files with the model, and commit."""
    request, plans, compression, store = job.request, job.staged.plan.plans, job.config.compression, staging.store
    settings = replicas.differing_settings({} if request.captured is None else request.captured.document)
    for one in plans:
        paths = {file.path for file in one.files}
        files = files + link_second_names(format_named(one.format), [f for f in files if f.path in paths], store)
    for one in plans:
        check_written_files(one, store)
    notes = [replicas.difference_note(settings, True)] if settings else []
    if request.check is not None:
        with local_folder(Place(store)) as folder:
            notes.append(request.check.compare(folder))
    if compression is not None:
        files = [_compress_in_place(file, store, compression) for file in files]
    manifest = manifest_of(
        plans,
        [*files, *job.staged.files],
        job.samples,
        compressed=compression is not None,
        bases=job.staged.plan.companions.bases,
        classes=job.staged.plan.companions.classes,
        notes=notes,
        kind=kind_of(request.adapter_only, request.attribute),
        step=request.step,
        metrics=request.metrics,
        world={"size": job.ranks.size, "engine": job.staged.plan.engine},
        run_id=request.run_id,
        rankings=job.config.rankings,
        export=bool(request.made_from) or (request.run_id is not None and not _has_state(request)),
        made_from=request.made_from,
    )
    size_bytes = stored_bytes(store, manifest)
    staging.commit(manifest)
    return _Saved(
        kind=manifest.kind,
        bytes=size_bytes,
        tensors=sum(len(part.tensors) for part in manifest.parts),
        seconds=time.monotonic() - job.begun,
        casts=_add_counts([part.casts for part in manifest.parts]),
        notes=manifest.notes,
        step=manifest.step,
    )


def _has_state(request: SaveRequest) -> bool:
    return request.captured is not None and request.captured.state is not None


def _compress_in_place(file: FileRecord, store: Store, compression: str) -> FileRecord:
    """The file's record once it is compressed in place: sizes are known only afterwards, so this is a second pass."""
    with edited_object(store, file.path) as path:
        compress_file(path, compression)
    return read_record(store, file.path)


def _add_counts(counts: list[Mapping[str, int]]) -> dict[str, int]:
    return dict(sum(map(Counter, counts), Counter[str]()))
