"""The state of a run at one moment; what has not changed since the last save is not looked up again."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeVar

from torch import nn

from ft_ckpt.distributed.ranks import Ranks, try_action
from ft_ckpt.distributed.tensor_info import Source
from ft_ckpt.model.entries import Entry
from ft_ckpt.training import optimizers
from ft_ckpt.training import state as training
from ft_ckpt.training.items import Item, Key, check_same_items, known_sources, with_extra_state
from ft_ckpt.training.state import Document, LocalState, TrainingState
from ft_ckpt.training.structure import Kept, Look, Structure, emptied, filled, is_placed

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Objects:
    """What a run consists of: the model that is saved, the items with a state, and what this rank has of its own."""

    model: nn.Module
    items: Sequence[Item]
    own: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Captured:
    """The state of a run, and the sources of its models; or, of a save without them, the structure alone.

    With a `look` both may be those of an earlier save, without tensors: these are in the look, by their places.
    """

    found: Mapping[Key, Source] = field(default_factory=dict)
    state: TrainingState | None = None
    look: Look | None = None
    structure: Structure | None = None

    @property
    def document(self) -> Document:
        """All of the state that is no tensor."""
        return {} if self.state is None else self.state.document

    def once(self, what: Hashable, make: Callable[[], T]) -> T:
        """What `make` gives; where the structure is known, what it gave the first time."""
        return make() if self.structure is None else self.structure.once(what, make)

    def with_tensors(self) -> "Captured":
        """The same with all tensors."""
        look, state = self.look, self.state
        if look is None or state is None:
            return self
        found = {key: filled(source, look) for key, source in self.found.items()}
        entries = tuple(e if e.source is None else replace(e, source=filled(e.source, look)) for e in state.entries)
        return replace(self, found=found, state=replace(state, entries=entries))


@dataclass(frozen=True, eq=False)
class _Known:
    """What a structure alone decides."""

    found: Mapping[Key, Source]  # without tensors, as those of the entries
    entries: tuple[Entry, ...]
    descriptions: Mapping[str, optimizers.Description]


@dataclass(frozen=True, eq=False)
class _Begun:
    objects: Objects
    local: LocalState
    look: Look
    structure: Structure | None


def capture_run(objects: Callable[[], Objects], ranks: Ranks, kept: Kept) -> Captured:
    """The state of the run that consists of `objects`. Collective. Moves nothing.

    The structure is remembered in `kept`, and what it alone decides. Raises SelectionError naming what cannot be saved.
    """
    begun, error = try_action(lambda: _begin(objects(), ranks, kept))
    again = _as_before(begun, ranks, error)
    if again is not None:
        return again

    def look() -> tuple[dict[Key, Source], LocalState]:
        found = known_sources(begun.objects.model, begun.objects.items)
        return found, training.add_optimizers(begun.local, training.describe_optimizers(begun.objects.items, found))

    looked, error = (None, error) if begun is None else try_action(look)
    found, local = looked or ({}, LocalState({"items": {}, "own": {}}, {}))
    everyone = training.exchange_facts(local, ranks, error, found)
    state = training.assemble_state(local, everyone, begun.objects.items, found, ranks.rank)
    if begun.structure is not None and all(_are_alike(local.facts, facts) for facts in everyone):
        _remember(begun, found, state)
    return Captured(found, state, begun.look, begun.structure)


def _begin(objects: Objects, ranks: Ranks, kept: Kept) -> _Begun:
    look = Look()
    look.model(objects.model)
    for item in objects.items:
        look.facts.append((item.name, item.kind))
        if item.kind == "model":
            look.model(item.value)
        elif item.kind == "optimizer":
            look.optimizer(item.value)
    if look.is_opaque:  # else all modules list what every module does
        objects = replace(objects, items=with_extra_state(objects.model, objects.items))
    local = training.describe_objects(objects.items, objects.own, digest=ranks.size > 1)
    trees = {**local.facts["own"], **{n: fact for n, fact in local.facts["items"].items() if "leaves" in fact}}
    look.others(local.leaves, {name: fact["leaves"] for name, fact in trees.items()})
    return _Begun(objects, local, look, kept.of("run", objects.model, look))


def _as_before(begun: _Begun | None, ranks: Ranks, error: BaseException | None) -> Captured | None:
    """The state by what is known of its structure; None when some rank does not know it."""
    known: _Known | None = None
    described: dict[str, optimizers.Description] | None = None
    if begun is not None and begun.structure is not None:
        known = begun.structure.made.get("run")
        described = None if known is None else _renewed(begun.objects.items, known)
    local = None if begun is None else begun.local
    digests = {} if local is None else {n: f["digest"] for n, f in local.facts["items"].items() if "digest" in f}
    digests |= training.digests_of_settings(described or {})
    own = {} if local is None or ranks.size == 1 else local.facts["own"]
    items = {} if begun is None else {item.name: item.kind for item in begun.objects.items}
    told = {"known": described is not None, "own": own, "digests": digests, "items": items}
    answers = ranks.agree("the look of save_state()", told, error)
    check_same_items([answer["items"] for answer in answers])
    alike = all(answer["known"] and answer["digests"] == answers[0]["digests"] for answer in answers)
    if begun is None or known is None or described is None or not alike:
        return None
    local = training.add_optimizers(begun.local, described)
    everyone: list[Document] = [local.facts]
    if ranks.size > 1:
        everyone = [{"own": answer["own"], "items": local.facts["items"]} for answer in answers]
    document = training.build_document(everyone, begun.objects.items)
    return Captured(known.found, TrainingState(known.entries, document), begun.look, begun.structure)


def _renewed(items: Sequence[Item], known: _Known) -> dict[str, optimizers.Description] | None:
    described = {}
    for item in items:
        if item.kind == "optimizer":
            now = optimizers.with_current_settings(
                optimizers.unwrap_optimizer(item.value), known.descriptions[item.name]
            )
            if now is None:
                return None
            described[item.name] = now
    return described


def _remember(begun: _Begun, found: Mapping[Key, Source], state: TrainingState) -> None:
    """Keep what the structure decides, if all of it can be told without tensors."""
    if begun.structure is None:
        return
    entries = [entry.source for entry in state.entries if entry.source is not None]
    if all(is_placed(source, begun.look) for source in chain(found.values(), entries)):
        described = {n: about["optimizer"] for n, about in state.document["items"].items() if "optimizer" in about}
        bare = tuple(replace(e, source=emptied(e.source, begun.look)) for e in state.entries if e.source is not None)
        known = {key: emptied(source, begun.look) for key, source in found.items()}
        begun.structure.made["run"] = _Known(known, bare, described)


def _are_alike(one: Document, other: Document) -> bool:
    """Whether two ranks have said the same of their optimizers."""
    return all(other["items"][name] is fact for name, fact in one["items"].items() if "optimizer" in fact)
