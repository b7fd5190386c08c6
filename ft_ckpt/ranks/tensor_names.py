"""Names the tensors that not all ranks have."""

from collections.abc import Callable, Iterable
from typing import NoReturn

from ft_ckpt.errors import RanksDisagreeError, listing
from ft_ckpt.ranks.agreement import Values, rank_numbers
from ft_ckpt.ranks.ranks import Ranks


def name_differing_tensors(
    ranks: Ranks, what: str, digest: str, names_of: Callable[[], Iterable[str]]
) -> None:
    """Raise RanksDisagreeError naming the tensors that some ranks lack.

    `digest` covers the tensors of this rank. Of the ranks with the same digest, the first alone
    sends its names. Collective: call it on every rank.
    """
    first = ranks.agree(what, {"digest": digest}, decide=_first_by_digest).result
    names = [*names_of()] if ranks.rank in first else []
    ranks.agree(f"{what}, by name", {"digest": digest, "names": names}, decide=_refuse_differing)


def _first_by_digest(values: Values) -> list[int]:
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
    # tensors by the ranks that alone hold them: the stages, if the model is a pipeline
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
