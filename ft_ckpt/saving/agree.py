"""The exchange of a save before any tensor moves: plans and replicas are compared."""

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
    differing_places,
    differing_replicas,
    digest_replicas,
    digests_by_place,
    replicated_tensors,
)
from ft_ckpt.saving.reuse_frozen import Offer
from ft_ckpt.saving.stage import StagedSave


@dataclass(frozen=True, eq=False)
class AgreedSave:
    """The result of the exchange that precedes every write.

    Identical on all ranks except `plan` and `samples`.
    """

    plan: SavePlan  # its request has the replicas that differ, if they were compared
    replicas_differ: bool  # the save must be planned again, to store the first rank's values
    fits: bool  # whether every rank can take a snapshot
    has_state_dict: bool  # whether the caller has passed a state dict on rank 0
    staging_folder: str | None  # rank 0's, if it is on a disk
    offers: Mapping[str, Offer]  # frozen files that may exist already, by path
    samples: tuple[BaseSamples, ...]  # of each rank; on rank 0 alone


def agree_on_plan(
    what: str,
    plan: SavePlan | None,
    staged: StagedSave | None,
    error: BaseException | None,
    context: SaveContext,
    *,
    fits: bool = True,
) -> AgreedSave:
    """Compare the plans and the replicas of all ranks in the exchange `what`.

    `plan` and `staged` are None after an `error` of this rank. `fits` says whether this rank can
    take a snapshot; in the result it says whether all ranks can. Collective: call it on every rank.
    Raises the error of any rank, RanksDisagreeError naming tensors that differ, and
    RanksDisagreeError naming replicas that differ if `on_difference="raise"`.
    """
    ranks = context.ranks
    digests: dict[str, ReplicaDigest] | None = None
    if error is None and plan is not None and _compares_replicas(plan, ranks):
        digests, error = ranks.attempt(partial(_digest_of_replicas, plan, ranks))
    facts: dict[str, Any] = {}
    if error is None and plan is not None and staged is not None:
        facts = _describe_save(plan, staged, digests or {})
    agreed = ranks.agree(
        what, {**facts, "fits": fits}, error, same=("path", "kind", "step"), decide=_terms_of
    )
    assert plan is not None, "the agreement has raised the error"
    terms = agreed.result
    if not terms["alike"]:
        digest = facts["tensors"]
        name_differing_tensors(ranks, "the tensors of save()", digest, partial(_stored_names, plan))
    # If rank 0 has a state dict, no rank compares: other ranks may not have been passed one.
    if digests is not None and not terms["state_dict"]:
        differing = differing_replicas(digests, terms["differing_places"], ranks)
        if differing:
            text = describe_differences(differing)
            report_differences(text, str(plan.request.target), ranks, context.config)
        plan = replace(plan, request=replace(plan.request, differing=differing))
    offers = {}
    for path, (count, offered) in terms["offers"].items():
        offers[path] = Offer(count, tuple(offered))
    return AgreedSave(
        plan,
        replicas_differ=digests is not None and bool(plan.request.differing),
        fits=terms["fits"],
        has_state_dict=terms["state_dict"],
        staging_folder=terms["stage"],
        offers=offers,
        samples=tuple(value["samples"] for value in agreed.values),
    )


def report_differences(differences: str, saved: str, ranks: Ranks, config: SaverConfig) -> None:
    """Raise RanksDisagreeError for differences between ranks, or warn of them.

    `config.on_difference` decides which. `differences` describes the differences; `saved` names the
    checkpoint.
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
    if plan.request.differing is not None:  # compared before this save was planned again
        return False
    # a state dict is complete on rank 0, which has no replicas of it to compare
    return plan.request.state_dict is None


def _digest_of_replicas(plan: SavePlan, ranks: Ranks) -> dict[str, ReplicaDigest]:
    return digest_replicas(replicated_tensors(plan.plans), ranks.rank)


def _describe_save(
    plan: SavePlan, staged: StagedSave, digests: Mapping[str, ReplicaDigest]
) -> dict[str, Any]:
    """Return the facts, as JSON, that ranks compare or that rank 0 needs from every rank."""
    request = plan.request
    is_merged = request.merge is not None
    store = staged.store
    offers = {path: [offer.ranks, offer.digests] for path, offer in staged.offers.items()}
    return {
        "path": str(request.target),
        "kind": "merged" if is_merged else request.kind,
        "step": request.step,
        "tensors": _digest_of_specs(plan),
        "state_dict": request.state_dict is not None,
        "samples": plan.samples,
        # the staging folder, in which ranks may write files together
        "stage": store.url if store is not None and store.local_folder is not None else None,
        "offers": offers,
        "replicas": digests_by_place(digests),
    }


def _digest_of_specs(plan: SavePlan) -> str:
    """Return a digest of the names, shapes and dtypes in all files."""
    described: list[tuple[str, list[tuple[Any, ...]]]] = []
    for part_plan in plan.plans:
        described += [(file.path, [*map(tuple, file.layout.specs)]) for file in part_plan.files]
    return xxhash.xxh3_64_hexdigest(repr(described).encode())


def _stored_names(plan: SavePlan) -> list[str]:
    names: list[str] = []
    for part_plan in plan.plans:
        part = part_plan.part
        folder = f"{part.path}/" if part.path else ""
        names += [f"{folder}{entry.name}" for entry in part.entries]
    return names


def _terms_of(values: Values) -> dict[str, Any]:
    """Return, on rank 0, the terms on which all ranks continue.

    Raises RanksDisagreeError if other ranks have a state dict and rank 0 does not.
    """
    first = values[0]
    with_state_dict = [str(rank) for rank, value in enumerate(values) if value["state_dict"]]
    # else rank 0 would wait for tensors that the other ranks do not send
    if with_state_dict and not first["state_dict"]:
        raise RanksDisagreeError(
            f"state_dict= was given on rank(s) {', '.join(with_state_dict)} and not on rank 0, "
            "which writes it; give it on rank 0"
        )
    return {
        "stage": first["stage"],
        "offers": first["offers"],
        "state_dict": first["state_dict"],
        "fits": all(value["fits"] for value in values),
        "alike": all(value["tensors"] == first["tensors"] for value in values),
        "differing_places": differing_places(value["replicas"] for value in values),
    }
