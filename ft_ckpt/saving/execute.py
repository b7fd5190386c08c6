"""One save from the request to the commit, in steps that every caller takes: plan and stage, agree, write, commit.

All ranks agree before a tensor moves and at the commit. The call of a background save plans it, and agrees once more.
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
from ft_ckpt.checkpoint.manifest import Manifest
from ft_ckpt.config import SaverConfig, human_size
from ft_ckpt.distributed.agreement import Values
from ft_ckpt.distributed.ranks import Ranks
from ft_ckpt.engines.follow import PendingPublish
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
from ft_ckpt.storage.local_store import LocalStore
from ft_ckpt.storage.place import Place, open_place
from ft_ckpt.storage.scratch import local_folder
from ft_ckpt.storage.store import Store
from ft_ckpt.training.items import name_differing_tensors
from ft_ckpt.transfer.push import PendingPush


@dataclass(frozen=True)
class SaveReport:
    """A finished save: its folder, its size and the saver's decisions.

    Identical on every rank except `seconds`, and `push`, `upload` and `publish`, which only rank 0 has.
    """

    path: Path | str
    """The committed folder; its URL where it is in a bucket."""
    kind: str
    """ "full", "adapter" or "attribute"."""
    bytes: int
    """Total size of the files, in bytes; hard links are counted once."""
    tensors: int
    """Number of stored tensors."""
    seconds: float
    """Seconds from the call to the durable commit."""
    casts: Mapping[str, int]
    """Number of tensors for each cast, such as "float32->bfloat16"."""
    notes: tuple[str, ...]
    """Decisions of the saver that affect a reader of the checkpoint."""
    step: int | None
    """Training step of this checkpoint."""
    push: PendingPush | None = None
    """The push to the Hub that the save requested; on rank 0 alone."""
    upload: PendingPush | None = None
    """The upload from the staging folder to the bucket, if there is one; on rank 0 alone."""
    publish: PendingPublish | None = None
    """The publish to the servers of the setting `publish`; on rank 0 alone."""
    target: Place | None = field(default=None, repr=False, compare=False)

    @property
    def place(self) -> Place:
        """The committed folder with the client of its bucket, as other functions of ft_ckpt take it."""
        return open_place(self.path) if self.target is None else self.target


@dataclass(frozen=True, eq=False)
class AgreedSave:
    """The result of the exchange that precedes every write; identical on all ranks except `request` and `samples`."""

    request: SaveRequest  # with the replicas that differ, if they were compared
    replicas_differ: bool  # the save must be planned again, to store the values of all ranks
    fits: bool  # whether every rank can take a snapshot
    state_dict: bool  # whether rank 0 was given one
    stage: str | None  # rank 0's staging folder, if it is on a disk
    offers: Mapping[str, Offer]  # frozen files that may exist already, by path
    samples: tuple[BaseSamples, ...]  # of each rank; on rank 0 alone


def run_save(
    request: SaveRequest | None,
    error: BaseException | None,
    ranks: Ranks,
    config: SaverConfig,
    begun: float,
    plan: SavePlan | None,
    shared: SharedFolders,
) -> SaveReport:
    """Carry out `request`, or report to the other ranks the `error` that prevented it. Collective.

    `begun` is the time of the call, by `time.monotonic`; `plan` the existing plan, if there is one; `shared` caches
    which folders all ranks see. Raises what `CheckpointSaver.save` raises.
    """
    changed: frozenset[str] = frozenset()  # frozen files that no earlier checkpoint has, as earlier tries found
    tries = 0
    written: dict[str, Any] | None
    while True:
        staged, error = _plan_and_stage(request, plan, error, ranks, config, tries, changed)
        try:
            # Everything that can be refused is refused here, before a tensor moves: later, ranks depend on each other.
            agreed = agree_on_plan("save()", request, staged, error, ranks, config)
            assert staged is not None, "the agreement has raised the error"
            request = agreed.request
            if agreed.replicas_differ:
                plan = None
                continue
            job = SaveJob(
                request, staged.plan, staged.staging, agreed.stage, agreed.offers, agreed.state_dict, ranks, config,
                shared, staged.files, staged.notes,
            )  # fmt: skip
            if job.state_dict and not ranks.is_main:  # a gather that made the dict leaves other ranks with {} or None
                written, error = {}, None
            else:
                written, error = ranks.attempt(explained(request.target)(partial(write_tensors, job)))
            report = _commit_on_all(job, agreed.samples, written, error, begun)
        except BaseException:
            shared.forget()
            raise
        finally:
            if staged is not None and staged.staging is not None:
                staged.staging.discard()
        if report is not None:
            return report
        # The disk is full, and the settings say to try again.
        plan, error = job.plan, None
        changed, tries = changed | (job.offers.keys() - job.taken), tries + 1


def _plan_and_stage(
    request: SaveRequest | None,
    plan: SavePlan | None,
    error: BaseException | None,
    ranks: Ranks,
    config: SaverConfig,
    tries: int,
    changed: frozenset[str],
) -> tuple[StagedSave | None, BaseException | None]:
    """Plan the save unless it is planned, and open the stage on rank 0. Errors are returned for the next agreement."""
    if request is None or error is not None:
        return None, error

    def stage() -> StagedSave:
        return prepare_stage(request, plan or plan_save(request, ranks, config), ranks, config, tries, changed)

    staged, error = ranks.attempt(explained(request.target)(stage))
    return staged, error


def agree_on_plan(
    what: str,
    request: SaveRequest | None,
    staged: StagedSave | None,
    error: BaseException | None,
    ranks: Ranks,
    config: SaverConfig,
    *,
    fits: bool = True,
) -> AgreedSave:
    """Compare the plans and the replicas of all ranks in the exchange `what`; the result `fits` if all ranks do.

    Raises the `error` of any rank, RanksDisagreeError naming tensors, or replicas if the settings refuse these.
    """
    compares = ranks.size > 1 and request is not None and request.differing is None and request.state_dict is None
    digests: dict[str, replicas.ReplicaDigest] = {}
    if staged is not None and compares:
        replicated = replicas.replicated_tensors(staged.plan.plans)
        made, error = ranks.attempt(partial(replicas.digest_replicas, replicated, ranks.rank))
        digests = made or {}
    facts = {} if request is None or staged is None or error else _describe_save(request, staged, digests)
    agreed = ranks.agree(what, {**facts, "fits": fits}, error, same=("path", "kind", "step"), decide=_terms_of)
    assert request is not None, "the agreement has raised the error"
    assert staged is not None, "the agreement has raised the error"
    terms = agreed.result
    if not terms["alike"]:
        entries = [(one.part.path, entry) for one in staged.plan.plans for entry in one.part.entries]
        names = (f"{path}/{entry.name}".lstrip("/") for path, entry in entries)
        name_differing_tensors(ranks, "the tensors of save()", facts["tensors"], lambda: names)
    if compares and not terms["state_dict"]:  # a state dict is given on rank 0 alone
        differing = replicas.differing_replicas(digests, terms["differing_places"], ranks)
        if differing:
            report_differences(replicas.describe_differences(differing), str(request.target), ranks, config)
        request = replace(request, differing=differing)
    return AgreedSave(
        request,
        replicas_differ=compares and bool(request.differing),
        fits=terms["fits"],
        state_dict=terms["state_dict"],
        stage=terms["stage"],
        offers={path: Offer(count, tuple(found)) for path, (count, found) in terms["offers"].items()},
        samples=tuple(value["samples"] for value in agreed.values),
    )


def report_differences(found: str, saved: str, ranks: Ranks, config: SaverConfig) -> None:
    """Raise RanksDisagreeError for differences between ranks, or warn of them, as configured.

    `found` describes the differences; `saved` names the checkpoint.
    """
    if config.on_difference == "raise":
        raise RanksDisagreeError(
            f"{found}, where these ranks should hold the same, and on_difference='raise'; nothing was committed. "
            "Average or broadcast them before the save, or save with on_difference='warn', which takes the first rank's"
        )
    if config.on_difference == "warn" and ranks.shows:
        warn(f"{saved}: {found}, which is stored", stacklevel=5)


def _describe_save(
    request: SaveRequest, staged: StagedSave, digests: Mapping[str, replicas.ReplicaDigest]
) -> dict[str, Any]:
    """The facts of a save that ranks compare or that rank 0 needs from each, as JSON."""
    names = repr([(f.path, [*map(tuple, f.layout.specs)]) for one in staged.plan.plans for f in one.files])
    store = staged.staging.store if staged.staging else None
    return {
        "path": str(request.target),
        "kind": "merged" if request.merged else kind_of(request.adapter_only, request.attribute),
        "step": request.step,
        "tensors": xxhash.xxh3_64_hexdigest(names.encode()),  # names, shapes and dtypes in all files
        "state_dict": request.state_dict is not None,
        "samples": staged.plan.samples,
        "stage": store.url if isinstance(store, LocalStore) else None,  # in which ranks may write files together
        "offers": {path: [offer.ranks, offer.digests] for path, offer in staged.offers.items()},
        "replicas": replicas.digests_by_place(digests),
    }


def _terms_of(facts: Values) -> dict[str, Any]:
    given = [str(rank) for rank, one in enumerate(facts) if one["state_dict"]]
    if given and not facts[0]["state_dict"]:  # the others would leave rank 0 waiting for their tensors
        raise RanksDisagreeError(
            f"state_dict= was given on rank(s) {', '.join(given)} and not on rank 0, which writes it; give it on rank 0"
        )
    return {
        **{key: facts[0][key] for key in ("stage", "offers", "state_dict")},
        "fits": all(one["fits"] for one in facts),
        "alike": all(one["tensors"] == facts[0]["tensors"] for one in facts),
        "differing_places": replicas.differing_places(one["replicas"] for one in facts),
    }


def _commit_on_all(
    job: SaveJob,
    samples: tuple[BaseSamples, ...],
    written: dict[str, Any] | None,
    error: BaseException | None,
    begun: float,
) -> SaveReport | None:
    """Compare the written files with the model and commit. Returns the report; None if the disk is full. Collective.

    A full disk is an error unless the settings say to make room and try again.
    """
    request, ranks, retries = job.request, job.ranks, job.config.when_full != "raise"
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
    saved = ranks.agree("the commit of save()", value, None if is_full else error, decide=commit).result
    if saved is None:
        return None
    report = SaveReport(
        request.target.location,
        **{**saved, "notes": tuple(saved["notes"])},
        seconds=time.monotonic() - begun,
        target=request.target,
    )
    if ranks.is_main:
        LOG.info("saved %s: %s in %.2f s", request.target.basename, human_size(report.bytes), report.seconds)
        for note in report.notes:
            LOG.info("%s: %s", request.target.basename, note)
    return report


def _commit_files(job: SaveJob, files: list[FileRecord], samples: tuple[BaseSamples, ...]) -> dict[str, Any]:
    """On rank 0: compare the files with the model and commit; return fields of the report, as JSON."""
    request, plan, staging = job.request, job.plan, job.staging
    assert staging is not None, "rank 0 has the staging"
    store, compression = staging.store, job.config.compression
    files = files + _link_second_names(plan, files, store)
    for one in plan.plans:
        check_written_files(one, store)
    notes = [*job.notes, *_notes_of_save(request, store)]
    handed_in, left_out = ([], []) if request.collect is None else request.collect(store)
    if compression is not None:
        files = _compress_files(files, store, compression)
    manifest = _manifest_of_job(job, [*files, *job.companions, *handed_in], samples, [*notes, *left_out])
    size_bytes = stored_bytes(store, manifest)
    if request.check_lease is not None:
        request.check_lease()
    staging.commit(manifest)
    return {
        "kind": manifest.kind,
        "bytes": size_bytes,
        "tensors": sum(len(part.tensors) for part in manifest.parts),
        "casts": dict(sum((Counter(part.casts) for part in manifest.parts), Counter[str]())),
        "notes": manifest.notes,
        "step": manifest.step,
    }


def _link_second_names(plan: SavePlan, files: list[FileRecord], store: Store) -> list[FileRecord]:
    """Give files the second name of their format, if it has one. Returns the records of the links."""
    links = []
    for one in plan.plans:
        paths = {file.path for file in one.files}
        links += link_second_names(format_named(one.format), [file for file in files if file.path in paths], store)
    return links


def _notes_of_save(request: SaveRequest, store: Store) -> list[str]:
    """The request's notes, and those on settings that differ between ranks and on the comparison of outputs."""
    settings = replicas.differing_settings({} if request.captured is None else request.captured.document)
    notes = [*request.notes]
    if settings:
        notes.append(replicas.difference_note(settings))
    if request.check is not None:
        with local_folder(Place(store)) as folder:
            notes.append(request.check.compare(folder))
    return notes


def _compress_files(files: list[FileRecord], store: Store, compression: str) -> list[FileRecord]:
    """Compress the files in a second pass, because their sizes are unknown before. Returns their new records."""
    for file in files:
        compress_file(Place(store, file.path), compression)
    return [read_record(store, file.path) for file in files]


def _manifest_of_job(
    job: SaveJob, files: list[FileRecord], samples: tuple[BaseSamples, ...], notes: list[str]
) -> Manifest:
    """The manifest of the files of a save."""
    request, plan = job.request, job.plan
    has_state = request.captured is not None and request.captured.state is not None
    return manifest_of(
        plan.plans,
        files,
        samples,
        compressed=job.config.compression is not None,
        bases=plan.companions.bases,
        classes=plan.companions.classes,
        notes=notes,
        kind=kind_of(request.adapter_only, request.attribute),
        step=request.step,
        metrics=request.metrics,
        world={"size": job.ranks.size, "engine": plan.engine},
        run_id=request.run_id,
        rankings=job.config.rankings,
        export=bool(request.made_from) or (request.run_id is not None and not has_state),
        made_from=request.made_from,
    )
