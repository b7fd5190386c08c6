"""The state of a run at one moment; what has not changed since the last save is not looked up again."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from torch import nn

from ft_ckpt.distributed.agreement import values_of_runs
from ft_ckpt.distributed.inventory import BufferRun, Inventory
from ft_ckpt.distributed.ranks import Ranks, try_action
from ft_ckpt.distributed.tensor_info import Source, TensorInfo
from ft_ckpt.model.entries import Entry
from ft_ckpt.training import state as training
from ft_ckpt.training.exchange import decide_together
from ft_ckpt.training.extra_state import with_allocations, with_extra_state
from ft_ckpt.training.gradient_flags import FLAGS, gradient_flags
from ft_ckpt.training.items import Item, Key, check_same_items, known_sources, optimizers_among
from ft_ckpt.training.optimizer_protocol import Description
from ft_ckpt.training.signature import PlanCache, Signature, Signer
from ft_ckpt.training.state import Document, EveryState, LocalState, TrainingState
from ft_ckpt.training.tensor_keys import KeyedFacts, with_tensor

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Objects:
    """What a run consists of: the model that is saved, the items with a state, and what this rank has of its own."""

    model: nn.Module
    items: Sequence[Item]
    own: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Captured:
    """What a save has found: the tensors by key, the facts that decide its plan, and of a run its state.

    Descriptions are without tensors, those of an earlier save where the facts are the same.
    """

    inventory: Inventory
    signature: Signature | None = None  # None: facts do not tell
    cache: PlanCache = field(default_factory=PlanCache)
    found: Mapping[Key, TensorInfo] = field(default_factory=dict)  # of the models of a run
    state: TrainingState | None = None
    exchange: int = 0  # the number of the exchange in which ranks told each other what the state is of

    @property
    def document(self) -> Document:
        """All of the state that is no tensor."""
        return {} if self.state is None else self.state.document

    def once(self, question: Hashable, make: Callable[[], T]) -> T:
        """What `make` gives; where the facts were the same before, what it gave then."""
        return self.cache.once(self.signature, question, make)

    def sources(self) -> dict[Key, Source]:
        """The tensors of the run's models, with their descriptions."""
        return {key: with_tensor(info, self.inventory) for key, info in self.found.items()}


@dataclass(frozen=True, eq=False)
class _Known:
    """What the facts alone decide."""

    number: int  # of the exchange that it is of, which all ranks count
    found: Mapping[Key, TensorInfo]
    entries: tuple[Entry, ...]
    flags: Document  # of gradients that are wanted
    runs: Sequence[BufferRun]  # that the descriptions are of
    descriptions: Mapping[str, Description]


@dataclass(frozen=True, eq=False)
class _Look:
    """What this rank has, before it is described."""

    objects: Objects
    local: LocalState
    inventory: Inventory
    signature: Signature | None


@dataclass(frozen=True)
class _LookFacts:
    """What a rank tells the others of its look at the run."""

    known: int | None  # the number of the exchange in which an earlier save had the same facts
    own: Mapping[str, Any]  # what it alone has, where there are others
    digests: Mapping[str, str]  # of objects' state and of optimizers' settings
    items: Mapping[str, str]  # kinds by name


@dataclass(frozen=True)
class _LookTerms:
    """What every rank knows of the look at the run on all of them."""

    known: bool  # whether an earlier save had the same facts on all
    own: Any  # how the tensors look that each has of its own, in runs; None where that was not so


def capture_run(objects: Callable[[], Objects], ranks: Ranks, cache: PlanCache) -> Captured:
    """The state of the run that consists of `objects`. Collective. Moves nothing.

    What the facts alone decide is kept in `cache`. Raises SelectionError naming what cannot be saved.
    """
    look, error = try_action(lambda: _look_at_run(objects(), ranks, cache))
    again = _captured_before(look, ranks, cache, error)
    if again is not None:
        return again

    def describe() -> tuple[dict[Key, Source], LocalState]:
        found = known_sources(look.objects.model, look.objects.items, look.inventory)
        return found, training.add_optimizers(look.local, training.describe_optimizers(look.objects.items, found))

    described, error = (None, error) if look is None else try_action(describe)
    found, local = described or ({}, LocalState({"items": {}, "own": {}}, {}))
    cache.exchanges += 1
    every = training.exchange_facts(local, ranks, error, found)
    assemble = partial(training.assemble_state, local, every, look.objects.items, found, ranks.rank)
    state, error = try_action(assemble)
    ranks.agree("the layout of save_state()", error=error)
    state.document[FLAGS] = gradient_flags(found)
    facts = KeyedFacts(look.inventory)
    bare = {key: facts.without_tensor(source) for key, source in found.items()}
    entries = tuple(e._replace(source=facts.without_tensor(e.source)) for e in state.entries if e.source is not None)
    about = {n: each["optimizer"] for n, each in state.document["items"].items() if "optimizer" in each}
    is_shared = not any("own" in description for description in about.values())  # settings are each rank's to tell
    if is_shared and _are_noted(look, [*bare.values()], entries):
        flags, runs = state.document[FLAGS], look.inventory.runs
        cache.keep(look.signature, "run", _Known(cache.exchanges, bare, entries, flags, runs, about))
    return Captured(look.inventory, look.signature, cache, bare, replace(state, entries=entries), cache.exchanges)


def _look_at_run(objects: Objects, ranks: Ranks, cache: PlanCache) -> _Look:
    signer = Signer(cache)
    signer.note_model(objects.model)
    for item in objects.items:
        signer.note_fact((item.name, item.kind))
        if item.kind == "model":
            signer.note_model(item.value, item.name)
        elif item.kind == "optimizer":
            signer.note_optimizer(item.value)
    beside = with_extra_state if signer.is_opaque else with_allocations  # else modules list what every module does
    objects = replace(objects, items=beside(objects.model, objects.items))
    local = training.describe_objects(objects.items, objects.own, digest=ranks.size > 1)
    trees = {**local.facts["own"], **{n: fact for n, fact in local.facts["items"].items() if "leaves" in fact}}
    signer.note_fact({name: fact["leaves"] for name, fact in trees.items()})
    signer.note_others(local.leaves)
    return _Look(objects, local, signer.inventory, signer.signature())


def _captured_before(
    look: _Look | None, ranks: Ranks, cache: PlanCache, error: BaseException | None
) -> Captured | None:
    """The state by what is known of the same facts; None when some rank does not know it."""
    known: _Known | None = None if look is None else cache.find(look.signature, "run")
    described = None if look is None or known is None else _described_anew(look.objects.items, known)
    number = None if known is None or described is None else known.number
    mine = None if look is None else _facts_of_look(look, number, described or {}, ranks)
    kinds = (_LookFacts, _LookTerms)
    terms, answers = decide_together(ranks, "the look of save_state()", mine, _terms_of_looks, kinds, error)
    if look is None or known is None or described is None or not terms.known:
        return None
    look.inventory.note_runs(known.runs)
    local = training.add_optimizers(look.local, described)
    trees = [dict(answer.own) for answer in answers] or values_of_runs(terms.own)
    if ranks.size == 1:
        trees = [local.facts["own"]]
    document = training.build_document(EveryState(local.facts["items"], trees), look.objects.items)
    document[FLAGS] = known.flags
    state = TrainingState(known.entries, document)
    return Captured(look.inventory, look.signature, cache, known.found, state, known.number)


def _terms_of_looks(answers: Sequence[_LookFacts]) -> _LookTerms:
    check_same_items([answer.items for answer in answers])
    first = answers[0]
    known = first.known is not None and all((a.known, a.digests) == (first.known, first.digests) for a in answers)
    return _LookTerms(known, training.looks_of_trees(dict(answer.own) for answer in answers) if known else None)


def _facts_of_look(look: _Look, known: int | None, described: Mapping[str, Description], ranks: Ranks) -> _LookFacts:
    digests = {name: fact["digest"] for name, fact in look.local.facts["items"].items() if "digest" in fact}
    digests |= training.digests_of_settings(described)
    own = {} if ranks.size == 1 else look.local.facts["own"]
    return _LookFacts(known, own, digests, {item.name: item.kind for item in look.objects.items})


def _described_anew(items: Sequence[Item], known: _Known) -> dict[str, Description] | None:
    described = {}
    for item, kind, optimizer in optimizers_among(items):
        now = kind.describe_again(optimizer, known.descriptions[item.name])
        if now is None:
            return None
        described[item.name] = now
    return described


def _are_noted(look: _Look, found: Sequence[TensorInfo], entries: Sequence[Entry]) -> bool:
    """Whether the same look at equal facts has each tensor under the same key: none came to the inventory later."""
    infos = [*found, *(info for entry in entries for info in entry.sources)]
    return look.signature is not None and look.signature.covers(look.inventory, infos)
