"""The exchange of a save before any tensor moves: the ranks compare their plans and their
replicas.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import xxhash

from ft_ckpt.config import SaverConfig
from ft_ckpt.errors import RanksDisagreeError
from ft_ckpt.messages import warn
from ft_ckpt.model import kind_of
from ft_ckpt.ranks import Ranks, Values
from ft_ckpt.runs import name_differing_tensors
from ft_ckpt.saving import replicas
from ft_ckpt.saving.plan import BaseSamples
from ft_ckpt.saving.request import SaveRequest
from ft_ckpt.saving.reuse_frozen import Offer
from ft_ckpt.saving.stage import StagedSave


@dataclass(frozen=True, eq=False)
class AgreedSave:
    """The result of the exchange that precedes every write; identical on all ranks except `request`
    and `samples`.
    """

    request: SaveRequest  # with the replicas that differ, if they were compared
    replicas_differ: bool  # the save must be planned again, to store the values of all ranks
    fits: bool  # whether every rank can take a snapshot
    state_dict: bool  # whether rank 0 was given one
    stage: str | None  # rank 0's staging folder, if it is on a disk
    offers: Mapping[str, Offer]  # frozen files that may exist already, by path
    samples: tuple[BaseSamples, ...]  # of each rank; on rank 0 alone


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
    """Compare the plans and the replicas of all ranks in the exchange `what`; the result `fits` if
    all ranks do.

    Raises the `error` of any rank, RanksDisagreeError naming tensors, or replicas if the settings
    refuse these.
    """
    compares = (
        ranks.size > 1
        and request is not None
        and request.differing is None
        and request.state_dict is None
    )
    digests: dict[str, replicas.ReplicaDigest] = {}
    if staged is not None and compares:
        replicated = replicas.replicated_tensors(staged.plan.plans)
        made, error = ranks.attempt(partial(replicas.digest_replicas, replicated, ranks.rank))
        digests = made or {}
    facts = (
        {}
        if request is None or staged is None or error
        else _describe_save(request, staged, digests)
    )
    agreed = ranks.agree(
        what, {**facts, "fits": fits}, error, same=("path", "kind", "step"), decide=_terms_of
    )
    assert request is not None, "the agreement has raised the error"
    assert staged is not None, "the agreement has raised the error"
    terms = agreed.result
    if not terms["alike"]:
        entries = [
            (one.part.path, entry) for one in staged.plan.plans for entry in one.part.entries
        ]
        names = (f"{path}/{entry.name}".lstrip("/") for path, entry in entries)
        name_differing_tensors(ranks, "the tensors of save()", facts["tensors"], lambda: names)
    if compares and not terms["state_dict"]:  # a state dict is given on rank 0 alone
        differing = replicas.differing_replicas(digests, terms["differing_places"], ranks)
        if differing:
            report_differences(
                replicas.describe_differences(differing), str(request.target), ranks, config
            )
        request = replace(request, differing=differing)
    return AgreedSave(
        request,
        replicas_differ=compares and bool(request.differing),
        fits=terms["fits"],
        state_dict=terms["state_dict"],
        stage=terms["stage"],
        offers={
            path: Offer(count, tuple(found)) for path, (count, found) in terms["offers"].items()
        },
        samples=tuple(value["samples"] for value in agreed.values),
    )


def report_differences(found: str, saved: str, ranks: Ranks, config: SaverConfig) -> None:
    """Raise RanksDisagreeError for differences between ranks, or warn of them, as configured.

    `found` describes the differences; `saved` names the checkpoint.
    """
    if config.on_difference == "raise":
        raise RanksDisagreeError(
            f"{found}, where these ranks should hold the same, and on_difference='raise'; nothing "
            "was committed. Average or broadcast them before the save, or save with "
            "on_difference='warn', which takes the first rank's"
        )
    if config.on_difference == "warn" and ranks.shows:
        warn(f"{saved}: {found}, which is stored", stacklevel=5)


def _describe_save(
    request: SaveRequest, staged: StagedSave, digests: Mapping[str, replicas.ReplicaDigest]
) -> dict[str, Any]:
    """The facts of a save that ranks compare or that rank 0 needs from each, as JSON."""
    names = repr(
        [(f.path, [*map(tuple, f.layout.specs)]) for one in staged.plan.plans for f in one.files]
    )
    store = staged.staging.store if staged.staging else None
    return {
        "path": str(request.target),
        "kind": "merged" if request.merged else kind_of(request.adapter_only, request.attribute),
        "step": request.step,
        # names, shapes and dtypes in all files
        "tensors": xxhash.xxh3_64_hexdigest(names.encode()),
        "state_dict": request.state_dict is not None,
        "samples": staged.plan.samples,
        # in which ranks may write files together
        "stage": store.url if store is not None and store.local_folder is not None else None,
        "offers": {path: [offer.ranks, offer.digests] for path, offer in staged.offers.items()},
        "replicas": replicas.digests_by_place(digests),
    }


def _terms_of(facts: Values) -> dict[str, Any]:
    given = [str(rank) for rank, one in enumerate(facts) if one["state_dict"]]
    # the others would leave rank 0 waiting for their tensors
    if given and not facts[0]["state_dict"]:
        raise RanksDisagreeError(
            f"state_dict= was given on rank(s) {', '.join(given)} and not on rank 0, which writes "
            "it; give it on rank 0"
        )
    return {
        **{key: facts[0][key] for key in ("stage", "offers", "state_dict")},
        "fits": all(one["fits"] for one in facts),
        "alike": all(one["tensors"] == facts[0]["tensors"] for one in facts),
        "differing_places": replicas.differing_places(one["replicas"] for one in facts),
    }
