"""Two ranks that share the samples of one run: handed out by rank 0, or by the same calls on both."""

from pathlib import Path

import harness  # first: it arms the stack dump
import torch.distributed as dist
from training import QUIET, network

from ft_ckpt import CheckpointSaver, Every, Frontier


def begin(folder: Path) -> tuple[CheckpointSaver, Frontier]:
    frontier = Frontier(40, epochs=2, shuffle=True)
    saver = CheckpointSaver(None, folder, every=Every(steps=1, signals=()), enter_timeout_seconds=60, **QUIET)
    saver.register(model=network(), frontier=frontier)
    saver.resume()
    return saver, frontier


@harness.named
def leader(folder: Path) -> None:
    """Rank 0 takes and reports; the other rank has a frontier of the same arguments and does not use it."""
    for first, last in ((0, 7), (7, 13)):
        saver, frontier = begin(folder)
        if harness.RANK == 0:
            tickets = frontier.take(last - first + (first > 0))  # the first one was in flight at the save
            assert [ticket.key for ticket in tickets] == [0, *range(max(first, 1), last)], tickets
            frontier.trained(*tickets[1 + (first == 0) :])
            frontier.dropped(*tickets[1 : 1 + (first == 0)])
        shared = [frontier.counts]
        dist.broadcast_object_list(shared)
        assert (frontier.counts == shared[0]) == (harness.RANK == 0)
        saver.step()
        saver.close()


@harness.named
def same_calls(folder: Path) -> None:
    """Both ranks take all samples of a step and train their part; their states are equal and stored once."""
    for first, last in ((0, 7), (7, 13)):
        saver, frontier = begin(folder)
        tickets = frontier.take(last - first + (first > 0))
        _mine = tickets[harness.RANK :: harness.WORLD]
        assert [ticket.key for ticket in tickets] == [0, *range(max(first, 1), last)], tickets
        frontier.dropped(*tickets[1 : 1 + (first == 0)])
        frontier.trained(*tickets[1 + (first == 0) :])
        saver.step()
        saver.close()


@harness.named
def grown(folder: Path) -> None:
    """Two ranks resume what one rank saved."""
    _, frontier = begin(folder)
    assert frontier.counts["trained"] == 6
    assert [ticket.key for ticket in frontier.take(3)] == [0, 7, 8]


def main(case: str, folder: Path) -> None:
    harness.NAMED[case](folder)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    harness.run(main)
    dist.destroy_process_group()
