"""What every rank holds whole is compared, not believed to be the same: by one digest of each rank.

The digest is of all bits, so it is a proof. Where ranks have come apart (LocalSGD, statistics of batches, parameters
that a wrapper was told to ignore) rank 0's tensor is the checkpoint's, and is written by rank 0 alone; a run keeps
those of the other ranks beside it.
"""

import ctypes
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
import xxhash
from torch import Tensor

from ft_ckpt.deliver import PartPlan
from ft_ckpt.engines import Source, of_rank_0
from ft_ckpt.entries import Entry, Part
from ft_ckpt.errors import IncompleteError, RanksDisagreeError, listing
from ft_ckpt.holdings import held_by
from ft_ckpt.ranks import Ranks
from ft_ckpt.verdicts import numbers

Apart = Mapping[str, tuple[int, ...]]  # tensor, as a run names it -> the ranks whose own is not rank 0's
WEIGHTS = "weights"  # the folder, in such names, of the model that is saved
_WORDS = 1 << 24  # of 8 bytes, digested at a time on an accelerator
_ODD = (-7046029254386353131, -4417276706812531889, -8663945395140668459)  # odd factors that spread bits, of xxHash


def of_plans(plans: Iterable[PartPlan]) -> dict[str, Source]:
    """What is in the files of `plans` and should be the same on every rank, each tensor once."""
    found: dict[int, tuple[str, Source]] = {}
    for plan in plans:
        written = {spec.name for file in plan.files for spec in file.layout.specs}
        for entry in plan.part.entries:
            for name, source in _named(plan.part, entry) if entry.name in written else ():
                if source.holding.alike:
                    found.setdefault(source.identity, (name, source))
    return dict(found.values())


def digests(sources: Mapping[str, Source]) -> dict[str, str]:
    """The digest of what this rank has of each source, hexadecimal; "" where it has nothing."""
    found = {name: source.holding.local for name, source in sources.items()}
    made = {name: _on_host(tensor) for name, tensor in found.items() if tensor is not None and tensor.is_cpu}
    elsewhere = {name: tensor for name, tensor in found.items() if tensor is not None and not tensor.is_cpu}
    folded = [folded_bits(tensor).cpu() for tensor in elsewhere.values()]
    made |= {name: f"{int(value):x}" for name, value in zip(elsewhere, folded, strict=True)}
    return {name: made.get(name, "") for name in found}


def told(made: Mapping[str, str]) -> str:
    """The one digest that a rank tells the others."""
    return xxhash.xxh3_128_hexdigest(repr(list(made.items())).encode())


def differing(made: Mapping[str, str], answers: Sequence[str], ranks: Ranks) -> Apart:
    """The tensors that ranks have otherwise than rank 0, from the one digest of each. Collective where these differ."""
    if len(set(answers)) == 1:
        return {}
    everyone = ranks.agree("the comparison of what all ranks hold", {"digests": dict(made)})
    found: dict[str, tuple[int, ...]] = {}
    for name in dict.fromkeys(name for one in everyone for name in one["digests"]):
        had = {rank: one["digests"][name] for rank, one in enumerate(everyone) if name in one["digests"]}
        first = next(iter(had.values()))
        odd = tuple(rank for rank, digest in had.items() if digest != first)
        if odd:
            found[name] = odd
    return found


def described(apart: Apart) -> str:
    """Which tensors differ, and on which ranks, in words."""
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    for name, odd in apart.items():
        by_ranks.setdefault(odd, []).append(name.removeprefix(f"{WEIGHTS}/"))
    some = [f"{listing(names, ', ')} on rank(s) {numbers(list(odd))}" for odd, names in by_ranks.items()]
    return f"{listing(some)}: not as on rank 0"


def refuse(apart: Apart) -> None:
    """Raise RanksDisagreeError naming the tensors and the ranks."""
    raise RanksDisagreeError(
        f"{described(apart)}, where all ranks should hold the same, and on_difference='raise'; nothing was committed. "
        "Average or broadcast them before the save, or save with on_difference='warn', which takes rank 0's"
    )


def refuse_experts(parts: Iterable[Part]) -> None:
    """Raise IncompleteError naming experts that DeepSpeed has spread over the ranks, under the same names on each."""
    named = {source.name: source.live for part in parts for entry in part.entries for _, source in _named(part, entry)}
    spread = {name: str(live.group_name) for name, live in named.items() if _is_spread(live)}
    if spread:
        groups = ", ".join(sorted(set(spread.values())))
        raise IncompleteError(
            f"{listing(list(spread), ', ')}: experts of this rank alone ({groups}); other ranks hold others under the "
            "same names, and they cannot be put together here. Train with ep_size=1, or save with DeepSpeed's own "
            "engine.save_checkpoint()"
        )


def set_apart(parts: Sequence[Part], apart: Apart, rank: int) -> list[Part]:
    """The parts with rank 0's of what is `apart`, a note of it, and in a training state each other rank's own."""
    sources = {name: s for part in parts for entry in part.entries for name, s in _named(part, entry) if name in apart}
    odd = frozenset(source.identity for source in sources.values())
    kept = [entry for name, source in sources.items() for entry in _own(name, source, apart[name], rank)]
    has_state = any(part.kind == "state" for part in parts)
    way = "rank 0's are stored, each rank's own beside them" if has_state else "rank 0's are stored"
    changed = []
    for number, part in enumerate(parts):
        entries = [_changed(entry, odd) for entry in part.entries] + (kept if part.kind == "state" else [])
        notes = part.notes if number else (*part.notes, f"{described(apart)}; {way}")
        changed.append(replace(part, entries=tuple(entries), notes=notes))
    return changed


def own_name(name: str, rank: int) -> str:
    """The stored name of what `rank` alone has of the tensor `name`."""
    return f"rank-{rank}/{name}"


def folded_bits(tensor: Tensor) -> Tensor:
    """A digest of all bits of the tensor and their places, one int64, made where the tensor is."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    data = data.clone() if data.storage_offset() % 8 else data
    whole = data.numel() - data.numel() % 8
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for words, first in ((data[:whole].view(torch.int64), 0), (data[whole:], whole)):
        for low in range(0, words.numel(), _WORDS):
            some = words[low : low + _WORDS].to(torch.int64)
            places = torch.arange(first + low, first + low + some.numel(), device=data.device)
            mixed = _mixed(some ^ (places * _ODD[0]), _ODD[1])
            total += _mixed(mixed, _ODD[2]).sum()  # which wraps
    return total


def _mixed(words: Tensor, factor: int) -> Tensor:
    """Upper bits are spread by the product to none below them: so they are folded down."""
    words = words * factor
    return words ^ ((words >> 32) & 0xFFFFFFFF)


def _on_host(tensor: Tensor) -> str:
    data = tensor.detach().contiguous()
    return xxhash.xxh3_128_hexdigest(
        (ctypes.c_char * data.nbytes).from_address(data.data_ptr()) if data.nbytes else b""
    )


def _named(part: Part, entry: Entry) -> Iterator[tuple[str, Source]]:
    """The sources of an entry by the names they have in a run."""
    if entry.group is not None:
        yield from ((f"{WEIGHTS}/{source.name}", source) for source in entry.group.sources)
    elif entry.source is not None:
        yield entry.name if part.kind == "state" else f"{WEIGHTS}/{entry.source.name}", entry.source


def _changed(entry: Entry, odd: frozenset[int]) -> Entry:
    if entry.source is None or entry.source.identity not in odd:
        return entry
    return replace(entry, source=of_rank_0(entry.source))


def _own(name: str, source: Source, owners: Iterable[int], rank: int) -> Iterator[Entry]:
    """The entries of what ranks other than 0 have of one tensor."""
    for owner in owners:
        local = source.holding.local if owner == rank else None
        stored = own_name(name, owner)
        mine = replace(source, name=stored, holding=held_by(owner, source.holding.view, local))
        yield Entry(stored, source.shape, source.dtype, source.dtype, mine)


def _is_spread(live: object) -> bool:
    """Whether DeepSpeed counts the parameter to the experts that each rank of a group has of its own."""
    group = getattr(live, "group_name", None)
    return getattr(live, "allreduce", True) is False and group is not None and str(group) != "ep_size_1"
