"""Names the tensors that some ranks do not have, in an error."""

from collections.abc import Callable, Iterable
from typing import NoReturn

from ft_ckpt.errors import RanksDisagreeError, listing
from ft_ckpt.ranks.agreement import Values, rank_numbers
from ft_ckpt.ranks.ranks import Ranks


def name_differing_tensors(
    ranks: Ranks, what: str, digest: str, names_of: Callable[[], Iterable[str]]
) -> None:
    """Raise RanksDisagreeError naming the tensors that some ranks do not have.

    `digest` covers the tensors of this rank, and `names_of` returns their names. Ranks with equal
    digests have equal names, so only the first of them sends its names. Collective: call it on
    every rank.
    """
    senders = ranks.agree(what, {"digest": digest}, decide=_first_by_digest).result
    names = [*names_of()] if ranks.rank in senders else []
    ranks.agree(f"{what}, by name", {"digest": digest, "names": names}, decide=_refuse_differing)


def _first_by_digest(values: Values) -> list[int]:
    """Return the first rank with each digest."""
    first: dict[str, int] = {}
    for rank, value in enumerate(values):
        first.setdefault(value["digest"], rank)
    return sorted(first.values())


def _refuse_differing(values: Values) -> NoReturn:
    groups: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value["digest"], []).append(rank)
    ranks_by_name: dict[str, list[int]] = {}
    for group in groups.values():
        for name in values[group[0]]["names"]:
            ranks_by_name.setdefault(name, []).extend(group)

    # Tensors that not all ranks have, by the ranks that have them. If the model is a pipeline,
    # these ranks are its stages.
    stages: dict[tuple[int, ...], list[str]] = {}
    for name, holders in ranks_by_name.items():
        if len(holders) < len(values):
            stages.setdefault(tuple(holders), []).append(name)

    problem = "tensors: of another shape or dtype, or in another order, on some ranks"
    if stages:
        lines = []
        for holders_of_stage, names in stages.items():
            numbers = rank_numbers([*holders_of_stage])
            lines.append(f"{listing(names, ', ')} on rank(s) {numbers} alone")
        problem = listing(lines)

    raise RanksDisagreeError(
        f"{problem}; every rank has to hold or share all tensors of the model: one whose layers "
        "are spread over the ranks (pipeline parallelism) is saved by the library that spread it"
    )
