"""Where a pass continues that the saved run cut otherwise: for other ranks, or other batches."""

from dataclasses import dataclass

from ft_ckpt.errors import LoadError
from ft_ckpt.messages import warn
from ft_ckpt.runs.data.cuts import DataCut


@dataclass(frozen=True)
class Continuation:
    """Where a pass continues after the items that all ranks had consumed together."""

    batch: int  # batches of the new cut that count as consumed
    offset: int  # items of the source before the first batch of the new cut
    repeated: int  # consumed items that are given again
    text: str


def continue_after(consumed: int, cut: DataCut, *, by_index: bool) -> Continuation:
    """Continue with `cut` after `consumed` items of the source.

    Items that a sampler yields by their index are skipped one by one, those of a stream by whole
    batches.
    """
    if by_index and consumed % cut.per_step:
        batch = 0
        offset = consumed - consumed % cut.divisor
        text = "in the middle of a batch of theirs: new batches are cut from there"
    else:
        batch = consumed // cut.per_step
        offset = 0
        text = f"with batch {batch + 1} of theirs"
    repeated = consumed - offset - batch * cut.per_step
    if repeated:
        text += f"; {repeated} of them are given again, so that all ranks begin alike"
    return Continuation(batch, offset, repeated, text)


def sharing_problems(was: DataCut, now: DataCut) -> list[str]:
    """Tell, in at most one sentence, why another number of ranks may skip or repeat samples."""
    if None in (was.sharing, now.sharing):
        problem = (
            "how ranks share the data is not known: where they do not take it in turn, some "
            "samples are left out now and others given again; use a DistributedSampler or "
            "Accelerate's loaders"
        )
        return [problem]
    if was.sharing == now.sharing:
        return []
    change = f"its order is {now.sharing} now, was {was.sharing}"
    return [f"{change}: some samples are left out and others given again"]


def report_difference(problem: str, on_difference: str) -> None:
    """Raise LoadError for "raise", warn for "warn", do nothing for "ignore"."""
    if on_difference == "raise":
        raise LoadError(problem)
    if on_difference == "warn":
        warn(problem)
