"""`ft-ckpt doctor PLACE` on several ranks.

The command shows what the ranks see of each other's files, and how saves will write there.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ft_ckpt.cli import output
from ft_ckpt.cli.cache_trials import MAX_SECONDS, CacheAge, measure_caches
from ft_ckpt.cli.options import print_lines
from ft_ckpt.ranks import Ranks, rank_numbers
from ft_ckpt.saving import FolderSharing, try_ranges, try_sharing
from ft_ckpt.saving.planning import Mode
from ft_ckpt.storage import Store

_AT_ONCE_SECONDS = 0.1


@dataclass(frozen=True)
class SharingReport:
    """How several ranks share a folder or bucket.

    Attributes:
        clients: The number of clients of its file system; 0 for a bucket.
        ranks: How each rank sees it. This is known on rank 0 only.
        caches: How long other clients show the old state after a change.
        range_problem: What went wrong when all ranks wrote byte ranges of one file. It is "" if all
            arrived, and None if it was not tried.
        mode: How saves will write, if every rank has enough to write.
        writes: That mode in words.
        reason: Why saves use this mode.
    """

    clients: int
    ranks: tuple[dict[str, Any], ...]
    caches: tuple[CacheAge, ...]
    range_problem: str | None
    mode: str
    writes: str
    reason: str


def examine_sharing(store: Store, ranks: Ranks) -> SharingReport:
    """Test how the ranks share `store`, and how saves decide to write there.

    Collective: call it on every rank. Raises the error of any rank on all.
    """
    sharing = try_sharing(store, ranks)
    caches: tuple[CacheAge, ...] = ()
    range_problem = sharing.range_problem
    folder = store.local_folder
    if folder is not None and not sharing.blind:
        caches = measure_caches(folder, ranks)
        if range_problem is None and sharing.mode is Mode.SHARED:
            range_problem = try_ranges(folder, ranks)

    return SharingReport(
        sharing.clients,
        tuple(_rank_rows(sharing)),
        caches,
        range_problem,
        sharing.mode.name.lower(),
        sharing.mode.value,
        sharing.reason,
    )


def _rank_rows(sharing: FolderSharing) -> Iterator[dict[str, Any]]:
    """Yield how each rank sees the folder, with a number from 1 in place of the client's name."""
    numbers: dict[str, int] = {}
    for view in sharing.views:
        client = view.get("client")
        number = None if client is None else numbers.setdefault(client, len(numbers) + 1)
        yield {**view, "client": number}


def show_sharing(report: SharingReport) -> None:
    """Print the report."""
    print_lines("")
    _show_ranks(report)
    if report.caches:
        print_lines("")
        rows = [(age.change, _age_text(age.seconds)) for age in report.caches]
        output.print_table(("changed by rank 0", "seen by the others"), rows)
    print_lines("")
    if report.caches:
        verdict = "not tried, not used"
        if report.range_problem is not None:
            verdict = f"lost ({report.range_problem})" if report.range_problem else "all arrive"
        print_lines(f"byte ranges that {len(report.ranks)} ranks write into one file: {verdict}")
    print_lines(f"saves: {report.writes} ({report.reason})")


def _show_ranks(report: SharingReport) -> None:
    rows = []
    blind = []
    for rank, view in enumerate(report.ranks):
        mount = view.get("mount")
        file_system = "-" if mount is None else f"{mount['kind']}, {mount['source']}"
        client = "-" if view["client"] is None else f"{view['client']}"
        rows.append((f"{rank}", view["host"], client, file_system))
        if not view["sees"]:
            blind.append(rank)

    output.print_table(("rank", "node", "client", "file system"), rows)
    if blind:
        print_lines(f"not one file system: rank(s) {rank_numbers(blind)} do not see it")
    elif report.clients:
        print_lines(f"{output.count_of(report.clients, 'client')} of one file system")


def _age_text(seconds: float | None) -> str:
    if seconds is None:
        return f"not within {MAX_SECONDS:g} s"
    return "at once" if seconds < _AT_ONCE_SECONDS else f"after {seconds:.1f} s"
