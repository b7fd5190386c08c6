"""Saves that are finished while training goes on: which ones can be, their snapshot, and what becomes of them.

The ranks meet in the foreground, where all is chosen and what must be is copied. The rest of the way, from the files
laid out to the commit, is that of any save, from the copies, in a thread; its agreements have keys of their own in the
store, and no collective runs in it: what ranks hold is written by each of them.
"""

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ft_ckpt import direct, engines, zero_optimizer
from ft_ckpt.background import Worker
from ft_ckpt.config import SaverConfig, parse_size
from ft_ckpt.deliver import PartPlan
from ft_ckpt.digests import chunks
from ft_ckpt.engines import Source
from ft_ckpt.optimizers import inner, parameter_of
from ft_ckpt.preparing import Prepared, Request, choose
from ft_ckpt.ranks import Ranks, attempt, current
from ft_ckpt.reuse import to_write
from ft_ckpt.running import Run
from ft_ckpt.saving import SaveReport, all_see, run
from ft_ckpt.schedule import History, learnt
from ft_ckpt.select import Entry
from ft_ckpt.snapshot import Copies, Snapshot, key, size_of
from ft_ckpt.training import items_of

_lanes = count(1)  # alike on all ranks: one is taken where all of them are


@dataclass(frozen=True, eq=False)
class PendingSave:
    """A save in the background, to the folder `path`, which exists once it is done."""

    path: Path
    future: "Future[SaveReport]"

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self.future.done()

    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait for it, at most `timeout` seconds, and give its report.

        Raises what the save would have raised, which the saver's next call raises as well; TimeoutError when time is
        up.
        """
        return self.future.result(timeout)


class Pending:
    """The saves in the background of one saver, one in flight."""

    def __init__(self, of: Run) -> None:
        self.before: History | None = None  # the run's before the save in flight, if that is one of its states
        self._of = of
        self.snapshot = Snapshot()
        self._worker = Worker()
        self._lane = ""
        self._looks = 0
        self._shared: dict[Path, bool] = {}  # folder -> whether all ranks see the same files in it

    def save(
        self, config: SaverConfig, make: Callable[[], Request], then: Callable[[Path], Any] = lambda path: None
    ) -> SaveReport | PendingSave:
        """Carry out what `make` gives, and call `then` with what was committed; in the background if `config` says so.

        In the background `then` is called there. Collective; raises what `saving.run` does.
        """
        begun, ranks = time.monotonic(), current(config.enter_timeout_seconds)
        request, error = attempt(make)
        if config.background:
            return self._start(request, error, ranks, config, begun, then)
        report = run(request, error, ranks, config, begun)
        then(report.path)
        return report

    def _start(
        self,
        request: Request | None,
        error: BaseException | None,
        ranks: Ranks,
        config: SaverConfig,
        begun: float,
        then: Callable[[Path], None],
    ) -> SaveReport | PendingSave:
        """Begin `request` in the background; or carry it out now, where no snapshot of it can be taken.

        It would be larger than it may, or tensors must come together from several ranks.
        """
        chosen: Prepared | None = None
        sources: list[Source] = []
        can, target = False, "" if request is None else str(request.target)
        if request is not None:
            weighed, error = attempt(lambda: _weighed(request, ranks, config))
            chosen, sources, can = weighed or (None, [], False)
        answers = ranks.agree("save() in the background", {"path": target, "can": can}, error, same=("path",))
        possible = all(answer["can"] for answer in answers)
        if request is None or chosen is None or not (possible and self._is_shared(request.target.parent, ranks)):
            report = run(request, error, ranks, config, begun, chosen)
            then(report.path)
            return report
        self._looks, self._lane = 0, self._lane or f"background-{next(_lanes)}"
        ranks = current(config.enter_timeout_seconds, self._lane)
        config = replace(config, each_rank_writes="on")
        owned = frozenset() if request.adapter_only else self.snapshot.watch(_steppers(self._of))
        _, error = attempt(lambda: self._take(sources, owned))
        try:
            job = partial(self._finish, request, error, ranks, config, begun, chosen, then)
            return PendingSave(request.target, self._worker.start(job))
        except BaseException:
            self.snapshot.drop()
            raise

    def _take(self, sources: Sequence[Source], owned: frozenset[int]) -> None:
        """Copy at once what anything but the step of a watched optimizer may change, such as buffers."""
        tensors = _locals(sources)
        now = _locals([source for source in sources if not _is_late(source, owned)])
        self.snapshot.take(list(now.values()), [tensor for name, tensor in tensors.items() if name not in now])

    def _finish(
        self,
        request: Request,
        error: BaseException | None,
        ranks: Ranks,
        config: SaverConfig,
        begun: float,
        chosen: Prepared,
        then: Callable[[Path], None],
    ) -> SaveReport:
        """In the thread: the rest of the copies, and the save itself."""
        copies, trouble = attempt(self.snapshot.finish)
        error = error or trouble
        if error is None:
            chosen, error = attempt(lambda: _copied(chosen, copies))
        report = run(None if error else request, error, ranks, config, begun, chosen)
        then(report.path)
        return report

    def settle(self) -> SaveReport | None:
        """Wait for the save in flight and give its report, or raise what it raised; None when there is none."""
        before, self.before = self.before, None
        report, error = attempt(self._worker.settle)
        if before is not None and error is not None:
            self._of.history = replace(self._of.history, best=before.best)
        elif before is not None:
            self._of.history = learnt(self._of.history, report.seconds)
        if error is not None:
            raise error
        return report  # type: ignore[no-any-return]  # of `attempt`, which takes anything

    def has_ended(self, ranks: Ranks) -> bool:
        """Whether the save in flight has ended on all ranks, as they all know; asked at every step, by all ranks.

        They meet for it at the first step after it began, the second, the fourth, and so on, and then every 64th.
        """
        if not self._worker.is_owing or ranks.size == 1:
            return self._worker.is_owing and self._worker.is_done
        self._looks += 1
        if self._looks % 64 and self._looks & (self._looks - 1):
            return False
        return all(answer["done"] for answer in ranks.agree("saver.step()", {"done": self._worker.is_done}))

    def close(self) -> None:
        """Settle, and give the optimizers and the memory back."""
        try:
            self.settle()
        finally:
            self.snapshot.close()

    def _is_shared(self, folder: Path, ranks: Ranks) -> bool:
        """Whether all ranks see the files that rank 0 makes in `folder`; asked once, so that no save must wait."""
        if ranks.size == 1:
            return True
        if folder not in self._shared:
            self._shared[folder] = all_see(folder, ranks)
        return self._shared[folder]


def _steppers(of: Run) -> list[torch.optim.Optimizer]:
    """The optimizers that say when they are about to step. ZeRO moves tensors outside of them: it is left out."""
    items = items_of(of.accelerator, of.registered)
    found = [inner(item.value) for item in items if item.kind == "optimizer" and not zero_optimizer.is_zero(item.value)]
    return [one for one in found if isinstance(one, torch.optim.Optimizer) and getattr(type(one).step, "hooked", False)]


def _weighed(request: Request, ranks: Ranks, config: SaverConfig) -> tuple[Prepared, list[Source], bool]:
    """What is saved, the sources of which this rank writes something, and whether that can wait for a thread."""
    chosen = choose(request, ranks, config)
    sources = list(_sources(chosen, request, ranks))
    fits = config.snapshot_bytes is None or size_of(_locals(sources).values()) <= parse_size(config.snapshot_bytes)
    return chosen, sources, fits and _is_free(chosen, request, ranks, config)


def _is_late(source: Source, owned: frozenset[int]) -> bool:
    """Whether nothing but the step of a watched optimizer changes the tensor."""
    return id(parameter_of(source)) in owned and source.engine in ("plain", "fsdp1", "fsdp2")


def _is_free(chosen: Prepared, request: Request, ranks: Ranks, config: SaverConfig) -> bool:
    """Whether no tensor has to move between ranks."""
    sources = [source for entry in _entries(chosen) for source in _of_entry(entry)]
    if any(source.holding.whole is not None for source in sources):
        return False
    if ranks.size == 1:
        return True
    plain = all(one.format == "safetensors" for one in chosen.plans) and config.compression is None
    if not plain or config.each_rank_writes == "off" or config.nonfinite == "raise" or request.state_dict_given:
        return False
    if any(source.holding.moves for pair in chosen.ties_to_check for source in pair):
        return False
    return not any(
        entry.group is not None or (entry.source is not None and entry.source.holding.moves and cut is None)
        for share in _shares(chosen, request, ranks)
        for entry, cut, spec in zip(share.entries, share.cuts, share.file.layout.specs, strict=True)
        if spec.size_bytes
    )


def _shares(chosen: Prepared, request: Request, ranks: Ranks) -> list[direct.Share]:
    return direct.shares(_new_files(chosen), ranks.size, engines.is_replicated(request.model))


def _sources(chosen: Prepared, request: Request, ranks: Ranks) -> Iterator[Source]:
    """The sources of which this rank writes something."""
    yield from (source for pair in chosen.ties_to_check for source in pair)
    if ranks.size == 1:
        yield from (source for entry in _entries(chosen) for source in _of_entry(entry))
        return
    for share in _shares(chosen, request, ranks):
        for entry, cut in zip(share.entries, share.cuts, strict=True):
            mine = ranks.leads if cut is None else any(owner == ranks.rank for _, _, owner in chunks(cut))
            yield from _of_entry(entry) if mine else ()


def _locals(sources: Iterable[Source]) -> dict[Hashable, Tensor]:
    """What this rank has of them, each once."""
    found = (source.holding.local for source in sources)
    return {key(tensor): tensor for tensor in found if tensor is not None}


def _new_files(chosen: Prepared) -> tuple[PartPlan, ...]:
    """The plans without the files that an earlier checkpoint has already."""
    return to_write(chosen.plans, frozenset(chosen.reuse.chosen))


def _entries(chosen: Prepared) -> Iterator[Entry]:
    """The tensors of these files."""
    for plan in _new_files(chosen):
        written = {spec.name for file in plan.files for spec in file.layout.specs}
        yield from (entry for entry in plan.part.entries if entry.name in written)


def _of_entry(entry: Entry) -> tuple[Source, ...]:
    if entry.group is not None:
        return entry.group.sources
    return () if entry.source is None else (entry.source,)


def _copied(chosen: Prepared, copies: Copies) -> Prepared:
    """The same plans, with the copies for the live tensors; of what this rank does not write there are none."""

    def source(one: Source) -> Source:
        local = one.holding.local
        return replace(
            one, holding=replace(one.holding, local=None if local is None else copies.get(key(local), local))
        )

    groups: dict[int, Any] = {}

    def entry(one: Entry) -> Entry:
        if one.group is not None:  # shared between entries: computed once
            groups.setdefault(id(one.group), replace(one.group, sources=tuple(map(source, one.group.sources))))
            return replace(one, group=groups[id(one.group)])
        return one if one.source is None else replace(one, source=source(one.source))

    def plan(one: PartPlan) -> PartPlan:
        return replace(one, part=replace(one.part, entries=tuple(map(entry, one.part.entries))))

    ties = tuple((source(one), source(other)) for one, other in chosen.ties_to_check)
    return replace(chosen, plans=tuple(map(plan, chosen.plans)), ties_to_check=ties)
