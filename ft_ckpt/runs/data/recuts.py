"""Computes where a pass continues if the number of ranks or the batch size has changed.

See `cuts` for the source of a loader and for the example of a cut.
"""

from dataclasses import dataclass

from ft_ckpt.errors import LoadError
from ft_ckpt.messages import warn
from ft_ckpt.runs.data.cuts import DataCut


@dataclass(frozen=True)
class Continuation:
    """Where a pass continues after the items that all ranks had consumed together.

    Attributes:
        batch: How many batches of the new cut count as consumed.
        offset: How many items of the source come before the first batch of the new cut.
        repeated: How many consumed items are yielded again.
        text: The end of a sentence about all this.
    """

    batch: int
    offset: int
    repeated: int
    text: str


def continue_after(consumed: int, cut: DataCut, *, by_index: bool) -> Continuation:
    """Return where to continue with `cut` after `consumed` items of the source.

    With `by_index`, items are skipped one by one, so new batches can begin in the middle of a batch
    of this cut. A stream is skipped by whole batches. For example, 40 items are consumed and a step
    takes 32: by index the first new batch begins at item 40, and in a stream at item 32.
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
    """Return why samples may be left out or repeated on another number of ranks.

    The list has at most one sentence. It is empty if both cuts divide the same order.
    """
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
    """Raise LoadError if `on_difference` is "raise", and warn if it is "warn"."""
    if on_difference == "raise":
        raise LoadError(problem)
    if on_difference == "warn":
        warn(problem)
