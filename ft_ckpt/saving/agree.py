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
from ft_ckpt.saving.stage import OpenStage


@dataclass(frozen=True, eq=False)
class AgreedSave:
    """The result of the exchange that precedes every write.

    Identical on all ranks except `plan` and `samples`.
    """

    plan: SavePlan  # its request has the replicas that differ, if they were compared
    replicas_differ: bool  # the save must be planned again, to store the first rank's values
    fits: bool  # whether every rank can take a snapshot
    state_dict: bool  # whether rank 0 was given one
    stage: str | None  # rank 0's staging folder, if it is on a disk
    offers: Mapping[str, Offer]  # frozen files that may exist already, by path
    samples: tuple[BaseSamples, ...]  # of each rank; on rank 0 alone


def agree_on_plan(
    what: str,
    plan: SavePlan | None,
    stage: OpenStage | None,
    error: BaseException | None,
    context: SaveContext,
    *,
    fits: bool = True,
) -> AgreedSave:
    """Compare the plans and the replicas of all ranks in the exchange `what`.

    The result `fits` if all ranks do. `plan` and `stage` are None after an `error`. Raises the
    error of any rank, RanksDisagreeError naming tensors, or replicas if the settings refuse these.
    """
    ranks = context.ranks
    digests: dict[str, ReplicaDigest] = {}
    compares_replicas = False
    if plan is not None and error is None:
        request = plan.request
        is_compared = request.differing is not None or request.state_dict is not None
        compares_replicas = ranks.size > 1 and not is_compared
    if plan is not None and compares_replicas:
        with ranks.deferring_error() as digesting:
            replicated = replicated_tensors(plan.plans)
            digests = digest_replicas(replicated, ranks.rank)
        error = digesting.error
    facts: dict[str, Any] = {}
    if plan is not None and stage is not None and error is None:
        facts = _describe_save(plan, stage, digests)
    agreed = ranks.agree(
        what, {**facts, "fits": fits}, error, same=("path", "kind", "step"), decide=_terms_of
    )
    assert plan is not None, "the agreement has raised the error"
    terms = agreed.result
    if not terms["alike"]:
        digest = facts["tensors"]
        name_differing_tensors(ranks, "the tensors of save()", digest, partial(_stored_names, plan))
    if compares_replicas and not terms["state_dict"]:  # a state dict is given on rank 0 alone
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
        replicas_differ=compares_replicas and bool(plan.request.differing),
        fits=terms["fits"],
        state_dict=terms["state_dict"],
        stage=terms["stage"],
        offers=offers,
        samples=tuple(value["samples"] for value in agreed.values),
    )


def report_differences(differences: str, saved: str, ranks: Ranks, config: SaverConfig) -> None:
    """Raise RanksDisagreeError for differences between ranks, or warn of them, as configured.

    `differences` describes them; `saved` names the checkpoint.
    """
    if config.on_difference == "raise":
        raise RanksDisagreeError(
            f"{differences}, where these ranks should hold the same, and on_difference='raise'; "
            "nothing was committed. Average or broadcast them before the save, or save with "
            "on_difference='warn', which takes the first rank's"
        )
    if config.on_difference == "warn" and ranks.shows:
        warn(f"{saved}: {differences}, which is stored", stacklevel=5)


def _describe_save(
    plan: SavePlan, stage: OpenStage, digests: Mapping[str, ReplicaDigest]
) -> dict[str, Any]:
    """The facts of a save that ranks compare or that rank 0 needs from each, as JSON."""
    request = plan.request
    is_merged = request.merge is not None
    store = stage.store
    offers = {path: [offer.ranks, offer.digests] for path, offer in stage.offers.items()}
    return {
        "path": str(request.target),
        "kind": "merged" if is_merged else request.kind,
        "step": request.step,
        "tensors": _digest_of_specs(plan),
        "state_dict": request.state_dict is not None,
        "samples": plan.samples,
        # in which ranks may write files together
        "stage": store.url if store is not None and store.local_folder is not None else None,
        "offers": offers,
        "replicas": digests_by_place(digests),
    }


def _digest_of_specs(plan: SavePlan) -> str:
    """A digest of the names, shapes and dtypes in all files."""
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
    """On rank 0: what all ranks go on with.

    Raises RanksDisagreeError for a state dict that other ranks have and rank 0 has not.
    """
    first = values[0]
    with_state_dict = [str(rank) for rank, value in enumerate(values) if value["state_dict"]]
    # the others would leave rank 0 waiting for their tensors
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
