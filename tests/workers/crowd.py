"""Many ranks in few processes: each is a thread with its own client of one store, that of a real
launch.

They save a run twice, and resume it. With "meetings" they only exchange their messages, about a
plan that one rank of each process has made for all. Rank 0 has the first process for itself, so the
cost of that process is that of a rank. Arguments: the folder of the run, the file for the figures
of each process, the number of ranks, "whole" or "meetings".
"""

import ctypes
import json
import os
import random
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore
from tuning import blocks_of

from ft_ckpt import CheckpointSaver, SaverConfig
from ft_ckpt.ranks import Ranks, current_ranks
from ft_ckpt.runs.data import rng
from ft_ckpt.runs.resume.opening import merge_access
from ft_ckpt.runs.state import (
    LocalState,
    Restored,
    agree_on_outcomes,
    exchange_descriptions,
    flatten_tree,
    local_state,
)
from ft_ckpt.saving import SaveContext, try_sharing
from ft_ckpt.saving.agree import agree_on_plan
from ft_ckpt.saving.planning import Mode, SavePlan, plan_save, request_of
from ft_ckpt.saving.stage import StagedSave
from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage.places import Place

PHASES = ("first save", "second save", "resume")
_here = threading.local()


class CountingStore:
    """A client of the store that counts what goes through it."""

    def __init__(self, store: Any, counts: Counter[str]) -> None:
        self._store, self._counts = store, counts

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._store, name)

        def call(*given: Any) -> Any:
            answer = real(*given)
            keys = given[0] if given and isinstance(given[0], list) else given[:1]
            self._counts["calls"] += 1
            self._counts["names"] += sum(map(len, keys))
            if name in ("set", "compare_set"):
                self._counts["put"] += len(given[-1])
            if name in ("get", "multi_get", "compare_set"):
                self._counts["got"] += (
                    sum(map(len, answer)) if isinstance(answer, list) else len(answer)
                )
            return answer

        return call

    def clone(self) -> "CountingStore":
        return CountingStore(self._store.clone(), self._counts)


def ranks_here(
    timeout_seconds: float = 600.0, channel: str = "", *, needs_group: bool = False
) -> Ranks:
    """Replacement of `current_ranks`: the ranks of this thread, which always has a group."""
    del needs_group
    found: dict[str, Ranks] = _here.ranks
    if channel not in found:
        first = found[""]
        found[channel] = Ranks(first.rank, first.size, first.store.clone(), channel=channel)
    found[channel].timeout_seconds = timeout_seconds
    return found[channel]


def run_rank(
    rank: int, size: int, live: Any, together: threading.Barrier, figures: dict[str, Any]
) -> None:
    """Run all phases as one rank."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    plain = TCPStore(*address, size, False, timedelta(seconds=600), wait_for_workers=False)
    counts: Counter[str] = Counter()
    _here.ranks = {"": Ranks(rank, size, CountingStore(plain, counts))}
    for phase in PHASES:
        meet_all(plain, phase, size)
        if not together.wait():
            figures[phase] = {"cpu": time.process_time(), "wall": time.monotonic()}
        counts.clear()
        together.wait()
        live(phase)
        figures.setdefault(f"{phase} counts", {})[rank] = dict(counts)
        if not together.wait():
            before = figures[phase]
            used = {
                "cpu": time.process_time() - before["cpu"],
                "wall": time.monotonic() - before["wall"],
            }
            figures[phase] = {
                **used,
                "peak": peak_bytes(),
            }


def peak_bytes() -> int:
    """The most memory that the process has had."""
    _, _, rest = Path("/proc/self/status").read_text().partition("VmHWM:")
    return int(rest.split()[0]) << 10


def meet_all(store: TCPStore, phase: str, size: int) -> None:
    """Wait for all ranks, without the calls that are counted."""
    if store.add(f"crowd/{phase}", 1) == size:
        store.set(f"crowd/{phase}/all", "")
    store.wait([f"crowd/{phase}/all"])


def live_whole(folder: Path, phase: str) -> None:
    """The save or resume of a rank in a phase."""
    if phase == "resume":
        assert not saver_of(folder).resume("must").report.problems
        return
    if not hasattr(_here, "saver"):
        _here.saver = saver_of(folder)
    _here.saver.save_state(path=folder / phase)


def live_meetings(folder: Path, own: tuple[LocalState, SavePlan], phase: str) -> None:
    """The exchanges of a phase alone, by the functions that make them."""
    ranks, (local, plan) = _here.ranks[""], own
    random.seed(ranks.rank)
    tree = flatten_tree(rng.capture_generators(), "rng", False)[0]
    local = replace(local, trees={"rng": tree})
    if phase == "resume":
        facts = {"path": str(folder), "identity": "x" * 32, "place": [1, 2, 3]}
        ranks.agree(
            "resume()",
            {"mode": "must", "facts": facts, "branch": None, "late": False},
            same=("mode",),
        )
        answer = {"has_checkpoint": True, "has_same_files": True}
        access = ranks.agree("opening", answer, decide=merge_access).result
        assert access == {"without": "", "same_files": [[0, ranks.size - 1]]}, access
        agree_on_outcomes(
            ranks, "the end", [Restored(f"item {number}", "restored") for number in range(8)]
        )
        return
    assert len(exchange_descriptions(local, [], ranks, {})[1]) == ranks.size
    if phase == "first save":
        assert try_sharing(LocalStore(folder), ranks).mode is Mode.SHARED
    agree_on_plan("save()", plan, StagedSave(), None, SaveContext(ranks, SaverConfig()))
    written = {"full": False, "digests": ["0" * 32] * 20}
    assert (
        len(ranks.agree("commit", written, decide=lambda _: None).values)
        == ranks.size * ranks.is_main
    )


def looked_up(folder: Path) -> tuple[LocalState, SavePlan]:
    """The data of the exchanges: the state of a run, the plan of its save."""
    folder.mkdir(parents=True, exist_ok=True)
    alone = Ranks(0, 1)
    _here.ranks = {"": alone}
    saver = saver_of(folder)
    captured = saver._run.capture_state(alone, {})
    request = request_of(
        saver.config,
        saver._run.model,
        Place(LocalStore(folder)),
        run_state=captured.state_to_save(),
        adapter_only=False,
        tokenizer=None,
        step=1,
        metrics={},
        differing={},  # a comparison of replicas would start a thread for each rank
    )
    plan = plan_save(request, alone, saver.config)
    return local_state([], {}, {}), plan


def saver_of(folder: Path) -> CheckpointSaver:
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    saver = CheckpointSaver(None, folder, each_rank_writes="on", io_threads=1)
    saver.register(model=model, optimizer=optimizer)
    return saver


def end_process(failed: threading.ExceptHookArgs) -> None:
    """End the process when one thread fails: the others would wait for it."""
    traceback.print_exception(failed.exc_value)
    sys.stderr.flush()
    os._exit(1)


def take_ranks() -> None:
    """Replace `current_ranks` in all of our modules."""
    for module in [*sys.modules.values()]:
        if (
            getattr(module, "current_ranks", None) is current_ranks
            and module is not sys.modules[__name__]
        ):
            module.current_ranks = ranks_here  # type: ignore[attr-defined]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    take_ranks()
    place, output, size, way = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    life = (
        partial(live_whole, place)
        if way == "whole"
        else partial(live_meetings, place, looked_up(place))
    )
    number, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    mine = [0] if not number else range(number, size, processes - 1)
    libc = ctypes.CDLL(None)
    libc.prctl(41, 1, 0, 0, 0)  # no large pages: a thread would have some of its own
    libc.mallopt(-8, 2)  # and at most two malloc arenas
    threading.stack_size(1 << 19)
    threading.excepthook = end_process
    together, figures = threading.Barrier(len(mine)), {"ranks": len(mine)}
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that of from now on
    figures["base"] = peak_bytes()
    threads = [
        threading.Thread(target=run_rank, args=(rank, size, life, together, figures))
        for rank in mine
    ]
    with blocks_of(1 << 16):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    output.with_suffix(f".{number}").write_text(json.dumps(figures))
    os._exit(0)  # without closing the many clients
