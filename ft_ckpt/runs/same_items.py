"""Compares the items and the tensors of a run between ranks."""

from collections.abc import Mapping, Sequence

from ft_ckpt.errors import RanksDisagreeError, listing
from ft_ckpt.ranks import rank_numbers


def check_same_items(kinds_of_ranks: Sequence[Mapping[str, str]]) -> None:
    """Raise RanksDisagreeError naming objects that some ranks lack, or that differ in kind between
    ranks.

    `kinds_of_ranks`: for each rank the kinds of its items by name.
    """
    names: dict[str, None] = {}
    for kinds in kinds_of_ranks:
        names.update(dict.fromkeys(kinds))
    problems = []
    for name in names:
        ranks_by_kind: dict[str | None, list[int]] = {}
        for rank, kinds in enumerate(kinds_of_ranks):
            ranks_by_kind.setdefault(kinds.get(name), []).append(rank)
        if len(ranks_by_kind) > 1:
            facts = [
                f"{kind or 'absent'} on rank(s) {rank_numbers(ranks)}"
                for kind, ranks in ranks_by_kind.items()
            ]
            problems.append(f"{name}: {', '.join(facts)}")
    if problems:
        raise RanksDisagreeError(
            f"{listing(problems)}; register the same objects on every rank, not under `if "
            "is_main_process`"
        )
