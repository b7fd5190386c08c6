"""Compares the plans and the replicas of all ranks, before a save moves any tensor.

The ranks agree: each rank sends a description of its save as JSON, rank 0 compares these
descriptions, and every rank gets the same answer. An error of one rank is raised on all ranks.

A replica is a copy of a tensor, or of a shard, that several ranks should hold with equal bits. The
save stores the replica of the first rank that has one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import xxhash

from ft_ckpt.config import SaverConfig
from ft_ckpt.errors import RanksDisagreeError
from ft_ckpt.messages import warn
from ft_ckpt.ranks import Ranks, Values, name_differing_tensors
from ft_ckpt.saving.context import SaveContext
from ft_ckpt.saving.planning import (
    BaseSamples,
    ReplicaDigest,
    SavePlan,
    describe_differences,
    differing_boxes,
    differing_replicas,
    digest_replicas,
    digests_by_box,
    replicated_tensors,
)
from ft_ckpt.saving.reuse_frozen import Candidates
from ft_ckpt.saving.stage import StagedSave


@dataclass(frozen=True, eq=False)
class AgreedSave:
    """What all ranks know about a save before they write.

    All fields except `plan` and `samples` are identical on all ranks.

    Attributes:
        plan: The plan of this rank. Its request names the replicas that differ, once the replicas
            were compared.
        replicas_differ: Whether replicas differ. Then the save must be planned again, so that the
            new plan stores the replicas of the first rank.
        fits: Whether every rank has the memory for a snapshot.
        has_state_dict: Whether the caller has passed a state dict on rank 0.
        staging_folder: The staging folder of rank 0; None in a bucket.
        candidates: Earlier files that may equal the planned files of frozen tensors, by the path
            of the planned file.
        samples: The sampled elements of the adapters' base models, from each rank; () except on
            rank 0.
    """

    plan: SavePlan
    replicas_differ: bool
    fits: bool
    has_state_dict: bool
    staging_folder: str | None
    candidates: Mapping[str, Candidates]
    samples: tuple[BaseSamples, ...]


def agree_on_plan(
    what: str,
    plan: SavePlan | None,
    staged: StagedSave | None,
    error: BaseException | None,
    context: SaveContext,
    *,
    fits: bool = True,
) -> AgreedSave:
    """Compare the plans and the replicas of all ranks.

    `what` names the call in errors. `plan` and `staged` are None if this rank has failed with
    `error`. `fits` says whether this rank has the memory for a snapshot; `AgreedSave.fits` says
    whether all ranks have it. Collective: call it on every rank. Raises the error of any rank,
    RanksDisagreeError naming tensors that differ in name, shape or dtype, and RanksDisagreeError
    naming replicas that differ if `on_difference="raise"`.
    """
    ranks = context.ranks
    digests: dict[str, ReplicaDigest] | None = None
    if error is None and plan is not None and _compares_replicas(plan, ranks):
        digests, error = ranks.attempt(partial(_digest_of_replicas, plan, ranks))
    described: dict[str, Any] = {}
    if error is None and plan is not None and staged is not None:
        described = _describe_save(plan, staged, digests or {})
    agreed = ranks.agree(
        what,
        {**described, "fits": fits},
        error,
        same=("path", "kind", "step"),
        decide=_compare_on_rank_0,
    )
    assert plan is not None, "the agreement has raised the error"
    answer = agreed.result
    if not answer["same_tensors"]:
        digest = described["tensors"]
        name_differing_tensors(ranks, "the tensors of save()", digest, partial(_stored_names, plan))

    # If rank 0 has a state dict, replicas are not compared: the caller may have passed none on the
    # other ranks, and these would compare the live tensors.
    if digests is not None and not answer["state_dict"]:
        differing = differing_replicas(digests, answer["differing_boxes"], ranks)
        if differing:
            text = describe_differences(differing)
            report_differences(text, str(plan.request.target), ranks, context.config)
        plan = replace(plan, request=replace(plan.request, differing=differing))

    candidates = {}
    for path, (writer_count, of_file) in answer["candidates"].items():
        candidates[path] = Candidates(writer_count, tuple(of_file))
    return AgreedSave(
        plan,
        replicas_differ=digests is not None and bool(plan.request.differing),
        fits=answer["fits"],
        has_state_dict=answer["state_dict"],
        staging_folder=answer["stage"],
        candidates=candidates,
        samples=tuple(value["samples"] for value in agreed.values),
    )


def report_differences(differences: str, saved: str, ranks: Ranks, config: SaverConfig) -> None:
    """Raise RanksDisagreeError for differences between ranks, or warn of them, or do neither.

    `config.on_difference` decides which. `differences` is a text that describes the differences.
    `saved` names the checkpoint.
    """
    if config.on_difference == "raise":
        raise RanksDisagreeError(
            f"{differences}, where these ranks should hold the same, and on_difference='raise'; "
            "nothing was committed. Average or broadcast them before the save, or save with "
            "on_difference='warn', which takes the first rank's"
        )
    if config.on_difference == "warn" and ranks.shows:
        warn(f"{saved}: {differences}, which is stored")


def _compares_replicas(plan: SavePlan, ranks: Ranks) -> bool:
    if ranks.size == 1:
        return False
    # They were compared before this save was planned again.
    if plan.request.differing is not None:
        return False
    # A state dict is complete on rank 0. The other ranks have no replicas of it.
    return plan.request.state_dict is None


def _digest_of_replicas(plan: SavePlan, ranks: Ranks) -> dict[str, ReplicaDigest]:
    return digest_replicas(replicated_tensors(plan.plans), ranks.rank)


def _describe_save(
    plan: SavePlan, staged: StagedSave, digests: Mapping[str, ReplicaDigest]
) -> dict[str, Any]:
    """Describe the save of this rank, as JSON.

    The fields are what rank 0 compares between ranks, and what it needs from every rank.
    """
    request = plan.request
    kind = request.kind if request.merge is None else "merged"

    # The staging folder, if it is on a disk: then ranks may write files together.
    stage = None
    if staged.store is not None and staged.store.local_folder is not None:
        stage = staged.store.url
    candidates = {}
    for path, of_file in staged.candidates.items():
        candidates[path] = [of_file.writer_count, of_file.digests]
    return {
        "path": str(request.target),
        "kind": kind,
        "step": request.step,
        "tensors": _digest_of_specs(plan),
        "state_dict": request.state_dict is not None,
        "samples": plan.samples,
        "stage": stage,
        "candidates": candidates,
        "replicas": digests_by_box(digests),
    }


def _digest_of_specs(plan: SavePlan) -> str:
    """Return a digest of the names, shapes and dtypes in all files."""
    described: list[tuple[str, list[tuple[Any, ...]]]] = []
    for part_plan in plan.plans:
        described += [(file.path, [*map(tuple, file.layout.specs)]) for file in part_plan.files]
    return xxhash.xxh3_64_hexdigest(repr(described).encode())


def _stored_names(plan: SavePlan) -> list[str]:
    """Return the name of each stored tensor, after the folder of its part."""
    names: list[str] = []
    for part_plan in plan.plans:
        part = part_plan.part
        folder = f"{part.path}/" if part.path else ""
        names += [f"{folder}{entry.name}" for entry in part.entries]
    return names


def _compare_on_rank_0(values: Values) -> dict[str, Any]:
    """Compare the descriptions of all ranks; return what every rank has to know, as JSON.

    Raises RanksDisagreeError if other ranks have a state dict and rank 0 does not.
    """
    first = values[0]
    with_state_dict = [str(rank) for rank, value in enumerate(values) if value["state_dict"]]

    # Without this check rank 0 would wait for tensors that the other ranks do not send.
    if with_state_dict and not first["state_dict"]:
        raise RanksDisagreeError(
            f"state_dict= was given on rank(s) {', '.join(with_state_dict)} and not on rank 0, "
            "which writes it; give it on rank 0"
        )

    return {
        "stage": first["stage"],
        "candidates": first["candidates"],
        "state_dict": first["state_dict"],
        "fits": all(value["fits"] for value in values),
        "same_tensors": all(value["tensors"] == first["tensors"] for value in values),
        "differing_boxes": differing_boxes(value["replicas"] for value in values),
    }
