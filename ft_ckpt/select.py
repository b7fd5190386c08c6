"""What is saved, and under which names: whole models, submodels, plain modules.

Works on names, shapes and dtypes only; no tensor is read and no rank is asked. The result is a list of parts, each a
folder that something can load, whose entries say where every stored tensor comes from.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ft_ckpt.engines import Source, unwrap
from ft_ckpt.errors import IncompleteError, SelectionError, UnknownAttributeError, listing
from ft_ckpt.names import walk
from ft_ckpt.tree_json import dumps
from ft_ckpt.values import dtype_name

MODEL_FILE = "model"
EXTRA_FILE = "extra_state.json"  # beside the weights: what modules list in their state dict that is no tensor


@dataclass(frozen=True, eq=False)
class Group:
    """Stored tensors that are computed together from full sources, such as experts kept fused in memory."""

    sources: tuple[Source, ...]
    convert: Callable[[dict[str, Tensor]], dict[str, Tensor]]  # by canonical name -> by stored name


@dataclass(frozen=True, eq=False)
class Entry:
    """One stored tensor: streamed from a source as it is but for its dtype, or the product of a group."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype  # in the file
    memory_dtype: torch.dtype
    source: Source | None = None
    group: Group | None = None

    @property
    def sources(self) -> tuple[Source, ...]:
        """What it is made from."""
        if self.group is not None:
            return self.group.sources
        return () if self.source is None else (self.source,)


@dataclass(frozen=True, eq=False)
class Part:
    """One loadable thing: the whole model, a submodel, a plain module or an adapter, in its own folder."""

    name: str
    path: str  # folder relative to the checkpoint, "" for the checkpoint itself
    kind: str  # "model" | "module" | "adapter"
    module: Any  # the nn.Module, unwrapped
    entries: tuple[Entry, ...]
    file: str = MODEL_FILE
    ties: tuple[tuple[str, ...], ...] = ()
    adapter: str | None = None
    active: bool = False
    beside: bool = False  # an adapter whose base, as it is now, is in the same checkpoint
    doubtful: tuple[tuple[Source, Source], ...] = ()  # declared one parameter, two in memory: compare before commit
    base: Mapping[str, Source] = field(default_factory=dict)  # frozen tensors of an adapter's base, by base name
    notes: tuple[str, ...] = ()
    passed: tuple[Source, ...] = ()  # left out on purpose: what the class or PEFT says it makes anew
    extra: str | None = None  # the text of EXTRA_FILE, if there is any


@dataclass(frozen=True, eq=False)
class View:
    """A module of the live model, unwrapped, with what is below it by names relative to it."""

    module: Any  # an nn.Module; what else it may have depends on its class
    sources: Mapping[str, Source] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)  # what its state dict lists that is no tensor


def view(
    model: nn.Module, found: Mapping[str, Source], attribute: str = "", extra: Mapping[str, Any] | None = None
) -> View:
    """The whole model, or the submodule at the dotted path `attribute`.

    Raises UnknownAttributeError naming what exists, SelectionError when it is no module, IncompleteError when it has
    no tensors.
    """
    module = module_at(model, attribute)
    prefix = f"{attribute}." if attribute else ""
    depth = len(attribute.split(".")) if attribute else 0
    below = {
        name.removeprefix(prefix): replace(source, raw=_raw_below(source, depth))
        for name, source in found.items()
        if name.startswith(prefix)
    }
    if not below:
        raise IncompleteError(f"{attribute or type(module).__name__}: no tensors to save; nothing is written")
    further = {n.removeprefix(prefix): value for n, value in (extra or {}).items() if n.startswith(prefix)}
    return View(module, below, further)


def module_at(model: nn.Module, attribute: str) -> nn.Module:
    """The model, or its submodule at the dotted path `attribute`, unwrapped. Raises what `view` says."""
    module = unwrap(model)
    for part in attribute.split(".") if attribute else []:
        if part not in module._modules and not hasattr(module, part):
            names = sorted(name for name, child in module.named_children() if child is not None)
            raise UnknownAttributeError(
                f"attribute {attribute!r}: {type(module).__name__} has no {part!r}; "
                f"it has {', '.join(names) or 'no submodules'}"
            )
        inner = getattr(module, part)
        if not isinstance(inner, nn.Module):
            raise SelectionError(f"attribute {attribute!r}: {part!r} is a {type(inner).__name__}, expected a module")
        module = unwrap(inner)
    return module


def _raw_below(source: Source, depth: int) -> str:
    """The raw name as the submodule `depth` attributes down spells it, once it is unwrapped itself."""
    steps, left = source.raw.split("."), source.name.split(".")[depth:]
    own = source.name.split(".")[:depth]
    while own or steps[0] != left[0]:
        step = steps.pop(0)
        own = own[1:] if own and step == own[0] else own
    return ".".join(steps)


def model_part(part: View, name: str, path: str, dtype: str) -> Part:
    """The part for a module saved in full: what `save_pretrained` would write, or a plain module's tensors."""
    hugging_face = is_pretrained(part.module)
    _refuse_unserialisable(part.module)
    kept, ties, notes = _without_aliases(part, hugging_face)
    entries = _converted(part.module, kept) if hugging_face else _as_they_are(kept)
    kind = "model" if hugging_face else "module"
    doubtful = tuple(diverged_ties(part)) if hugging_face else ()
    made = _cast(entries, part.module, dtype)
    taken = {source.identity for source in kept.values()}
    passed = tuple(source for source in part.sources.values() if source.identity not in taken)
    extra = dumps(dict(part.extra), name or type(part.module).__name__) if part.extra else None
    where = Part(name, path, kind, part.module, made, ties=ties, doubtful=doubtful, notes=notes)
    return replace(where, passed=passed, extra=extra)


def is_pretrained(module: nn.Module) -> bool:
    """Whether it is a transformers model; told by names, since that class takes a second to import."""
    return any(
        cls.__name__ == "PreTrainedModel" and cls.__module__.startswith("transformers.") for cls in type(module).__mro__
    )


def without_own_layouts(parts: Sequence[Part], is_run: bool) -> list[Part]:
    """The parts, with a note in a run's checkpoint of modules that have a `save_pretrained` of their own.

    Such classes (SentenceTransformer, wrappers with a value head) read nothing but the layout that they write. Raises
    SelectionError naming them where there is nothing to be resumed.
    """
    own = {id(part): type(part.module).__name__ for part in parts if _has_own_layout(part)}
    if own and not is_run:
        inside = [path for part in parts if id(part) in own for path in _pretrained_below(part)]
        asked = repr(inside[0] if len(inside) == 1 else inside)
        names, way = ", ".join(own.values()), f", or what is inside with attribute={asked}" if inside else ""
        raise SelectionError(
            f"{names}: has a layout of its own, which this would not be; save it with model.save_pretrained(...){way}, "
            "or a checkpoint to resume from with save_state()"
        )
    note = "{}: stored as a plain module; its own from_pretrained reads the layout of its save_pretrained() alone"
    return [replace(p, notes=(*p.notes, note.format(own[id(p)]))) if id(p) in own else p for p in parts]


def _has_own_layout(part: Part) -> bool:
    return part.kind == "module" and callable(getattr(type(part.module), "save_pretrained", None))


def _pretrained_below(part: Part) -> list[str]:
    """Paths of the transformers models in the part's module that are in no other."""
    found: list[str] = []
    for path, _, inner in walk(part.module):
        if is_pretrained(inner) and not any(path.startswith(f"{outer}.") for outer in found):
            found.append(path)
    return [f"{part.name}.{path}" if part.name else path for path in found]


def stored_as_in_memory(module: nn.Module, names: Mapping[str, Source]) -> bool:
    """Whether transformers writes this model's tensors under the names and in the form they have in memory."""
    return all(names.get(entry.name) is entry.source for entry in _converted(module, names))


def cast_entries(entries: Iterable[Entry], module: nn.Module, dtype: str) -> tuple[Entry, ...]:
    """The entries in the dtype that the policy `dtype` gives them."""
    return _cast(list(entries), module, dtype)


def diverged_ties(part: View) -> list[tuple[Source, Source]]:
    """Pairs the model declares to be one parameter but that are two in memory: to be compared before one is dropped."""
    config = getattr(part.module, "config", None)
    declared = getattr(part.module, "all_tied_weights_keys", None) or {}
    if not getattr(_text_config(config), "tie_word_embeddings", False):
        return []
    pairs = [(part.sources.get(one), part.sources.get(other)) for one, other in declared.items()]
    return [(a, b) for a, b in pairs if a is not None and b is not None and a.identity != b.identity]


def shared_between(parts: Iterable[Part]) -> tuple[tuple[str, ...], ...]:
    """Groups of "part:stored name" that are one parameter in different parts."""
    groups: dict[int, list[str]] = {}
    for part in parts:
        for entry in part.entries:
            if entry.source is not None:
                groups.setdefault(entry.source.identity, []).append(f"{part.name}:{entry.name}")
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def lossy_casts(part: Part) -> dict[str, int]:
    """Casts of the part that change a dtype, as {"float32->bfloat16": number of tensors}."""
    counts: dict[str, int] = {}
    for entry in part.entries:
        if entry.dtype != entry.memory_dtype:
            key = f"{dtype_name(entry.memory_dtype)}->{dtype_name(entry.dtype)}"
            counts[key] = counts.get(key, 0) + 1
    return counts


def main_dtype(part: Part) -> str:
    """The dtype that most elements of the part have in the file: what its config should say."""
    weight: dict[str, int] = {}
    for entry in part.entries:
        if entry.dtype.is_floating_point:
            size = max(1, torch.Size(entry.shape).numel())
            weight[dtype_name(entry.dtype)] = weight.get(dtype_name(entry.dtype), 0) + size
    return max(weight, key=lambda name: weight[name]) if weight else "float32"


def _refuse_unserialisable(module: Any) -> None:
    """Quantisers that keep weights in forms of their own, such as torchao's tensor subclasses, cannot be stored."""
    quantizer = getattr(module, "hf_quantizer", None)
    if quantizer is None:
        return
    makes = (cls.__name__ for cls in type(quantizer).__mro__ if "get_state_dict_and_metadata" in vars(cls))
    if next(makes, "HfQuantizer") != "HfQuantizer" or not quantizer.is_serializable():
        raise SelectionError(
            f"{type(module).__name__}: its quantised weights ({type(quantizer).__name__}) cannot be stored as they "
            "are; save the adapter alone with adapter_only=True, or dequantise the model first"
        )


def _without_aliases(
    part: View, hugging_face: bool
) -> tuple[dict[str, Source], tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """Names to store: of tied names the one a loader expects, found by parameter identity, never by storage."""
    ignored = set(getattr(part.module, "_keys_to_ignore_on_save", None) or ()) if hugging_face else set()
    names = [name for name in part.sources if name not in ignored]
    groups: dict[int, list[str]] = {}
    for name in names:
        groups.setdefault(part.sources[name].identity, []).append(name)
    dropped: set[str] = set()
    ties, notes = [], []
    for group in (group for group in groups.values() if len(group) > 1):
        keep = _kept_of(group, part.module) if hugging_face else group[:1]
        ties.append((keep[0], *(name for name in group if name != keep[0])))
        dropped.update(name for name in group if name not in keep)
        if len(keep) > 1:
            notes.append(f"{', '.join(keep)}: tied in memory but not by the model's class, stored once each")
    for one, other in diverged_ties(part) if hugging_face else ():
        alias = next(name for name in part.sources if part.sources[name] is one)
        main = next(name for name in part.sources if part.sources[name] is other)
        if alias not in dropped and main not in dropped:
            dropped.add(alias)  # the saver compares the two before it commits
            ties.append((main, alias))
    return {name: part.sources[name] for name in names if name not in dropped}, tuple(ties), tuple(notes)


def _kept_of(group: list[str], module: nn.Module) -> list[str]:
    """The names of a tied group to store, as transformers chooses: those no pattern declares as an alias."""
    patterns = [
        f"{re.escape(path)}\\.{key}" if path else key
        for path, _, inner in walk(module)
        for key in (getattr(inner, "_tied_weights_keys", None) or ())
    ]
    plain = [name for name in group if not any(re.search(pattern, name) for pattern in patterns)]
    return plain or [max(group)]


def _as_they_are(kept: Mapping[str, Source]) -> list[Entry]:
    return [Entry(name, source.shape, source.dtype, source.dtype, source) for name, source in kept.items()]


def warm_up() -> None:
    """Let transformers make its table of conversions, 60 ms once a process, where nothing else is waited for yet."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("")


def _converted(module: Any, kept: Mapping[str, Source]) -> list[Entry]:
    """Entries under the names transformers writes: it keeps some architectures otherwise in memory than on disk.

    The conversion runs on meta tensors: what comes back as the same object was only renamed and is streamed; the
    rest is converted in groups, one per layer where the layers can be converted on their own.
    """
    from transformers.core_model_loading import revert_weight_conversion

    placeholders = {name: torch.empty(s.shape, dtype=s.dtype, device="meta") for name, s in kept.items()}
    stored: dict[str, Tensor] = revert_weight_conversion(module, dict(placeholders))
    origin = {id(tensor): name for name, tensor in placeholders.items()}
    streamed = {name: origin[id(tensor)] for name, tensor in stored.items() if id(tensor) in origin}
    left = [name for name in kept if name not in set(streamed.values())]
    made = {name: tensor for name, tensor in stored.items() if name not in streamed}
    group_of = _groups(module, {name: kept[name] for name in left}, made, revert_weight_conversion)
    return [
        Entry(name, tuple(tensor.shape), tensor.dtype, tensor.dtype, kept[streamed[name]])
        if name in streamed
        else Entry(name, tuple(tensor.shape), tensor.dtype, tensor.dtype, group=group_of[name])
        for name, tensor in stored.items()
    ]


def _groups(
    module: Any, left: Mapping[str, Source], made: Mapping[str, Tensor], revert: Callable[..., dict[str, Tensor]]
) -> dict[str, Group]:
    """Stored name -> the group that makes it; one group for all where layers do not convert independently."""

    def group(names: list[str]) -> tuple[Group, dict[str, Tensor]]:
        chosen = {left[name].name: name for name in names}

        def convert(full: dict[str, Tensor]) -> dict[str, Tensor]:
            return revert(module, {chosen[name]: tensor for name, tensor in full.items()})

        sources = tuple(left[name] for name in names)
        return Group(sources, convert), convert(
            {s.name: torch.empty(s.shape, dtype=s.dtype, device="meta") for s in sources}
        )

    layers: dict[str, list[str]] = {}
    for name in left:
        layers.setdefault(re.sub(r"(\.\d+\.).*", r"\1", name), []).append(name)
    for split in (list(layers.values()), [list(left)]):
        result: dict[str, Group] = {}
        for names in split:
            one, outputs = group(names)
            result.update({name: one for name in outputs if made.get(name, None) is not None})
        if set(result) == set(made):
            return result
    raise SelectionError(
        f"{listing(sorted(set(made) ^ set(result)), ', ')}: these stored names cannot be attributed to live tensors; "
        "this transformers version converts this model in a way ft_ckpt does not know"
    )


def _cast(entries: list[Entry], module: nn.Module, policy: str) -> tuple[Entry, ...]:
    if policy == "as_is":
        return tuple(entries)
    target = _config_dtype(module) if policy == "config" else getattr(torch, policy)
    if target is None:
        return tuple(entries)
    strict = tuple(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    half = tuple(getattr(module, "_keep_in_fp32_modules", None) or ()) if target == torch.float16 else ()
    return tuple(_cast_one(entry, target, (*strict, *half)) for entry in entries)


def _cast_one(entry: Entry, target: torch.dtype, keep: tuple[str, ...]) -> Entry:
    """`entry` in `target` when it is an ordinary float that no rule of the model keeps in float32."""
    ordinary = entry.dtype in {torch.float64, torch.float32, torch.bfloat16, torch.float16}
    kept = entry.dtype == torch.float32 and any(part in entry.name.split(".") for part in keep)
    return entry if kept or not ordinary else replace(entry, dtype=target)


def _config_dtype(module: nn.Module) -> torch.dtype | None:
    value = getattr(getattr(module, "config", None), "dtype", None)
    return getattr(torch, value) if isinstance(value, str) else value


def _text_config(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config
