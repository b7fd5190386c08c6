"""Selects the tensors of a save and their names: whole models, submodels, plain modules.

Works on names, shapes and dtypes only, without reading a tensor or communicating. The result is a
list of parts, each a loadable folder, whose entries name the source of every stored tensor.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from ft_ckpt.errors import IncompleteError, SelectionError, UnknownAttributeError, listing
from ft_ckpt.formats import dtype_name, dtype_of, dump_object
from ft_ckpt.messages import did_you_mean
from ft_ckpt.model.conversion import cast_entries, converted_entries, kept_in_float32
from ft_ckpt.model.entries import MODEL_FILE, Part, main_dtype, unchanged_entry
from ft_ckpt.model.libraries import TRANSFORMERS, library_of
from ft_ckpt.ranks import Source, unwrap, walk_modules


@dataclass(frozen=True, eq=False)
class View:
    """A module of the live model, unwrapped, with its tensors by relative name."""

    module: Any  # an nn.Module of any class
    sources: Mapping[str, Source] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)  # non-tensor values of its state dict


def view_of(
    model: nn.Module,
    found: Mapping[str, Source],
    attribute: str = "",
    extra: Mapping[str, Any] | None = None,
) -> View:
    """A view of the whole model, or of the submodule at the dotted path `attribute`.

    Raises UnknownAttributeError naming the existing submodules, SelectionError when it is not a
    module, IncompleteError when it has no tensors.
    """
    module = module_at(model, attribute)
    prefix = f"{attribute}." if attribute else ""
    depth = len(attribute.split(".")) if attribute else 0
    below = {
        name.removeprefix(prefix): _with_raw_below(source, depth)
        for name, source in found.items()
        if name.startswith(prefix)
    }
    if not below:
        raise IncompleteError(
            f"{attribute or type(module).__name__}: no tensors to save; nothing is written"
        )
    further = {
        n.removeprefix(prefix): value for n, value in (extra or {}).items() if n.startswith(prefix)
    }
    return View(module, below, further)


def module_at(model: nn.Module, attribute: str) -> nn.Module:
    """The model, or its submodule at the dotted path `attribute`, unwrapped.

    Raises errors as `view_of`.
    """
    module = unwrap(model)
    for part in attribute.split(".") if attribute else []:
        if part not in module._modules and not hasattr(module, part):
            names = sorted(name for name, child in module.named_children() if child is not None)
            submodules = ", ".join(names) or "no submodules"
            hint = did_you_mean([part], names) or f"it has {submodules}"
            raise UnknownAttributeError(
                f"attribute {attribute!r}: {type(module).__name__} has no {part!r}; {hint}"
            )
        inner = getattr(module, part)
        if not isinstance(inner, nn.Module):
            raise SelectionError(
                f"attribute {attribute!r}: {part!r} is a {type(inner).__name__}, expected a module"
            )
        module = unwrap(inner)
    return module


def tensor_at(module: nn.Module, name: str) -> Any:
    """The attribute of `module` under a dotted name; None if there is none."""
    path, _, key = name.rpartition(".")
    try:
        return getattr(module.get_submodule(path), key)
    except AttributeError:
        return None


def put_at(module: nn.Module, name: str, value: Any) -> None:
    """Put a parameter or buffer under a dotted name."""
    path, _, key = name.rpartition(".")
    setattr(module.get_submodule(path), key, value)


def _with_raw_below(source: Source, depth: int) -> Source:
    """The source with its raw name relative to the unwrapped submodule `depth` attributes down."""
    if not depth and source.raw_name == source.name:
        return source
    steps, names = source.raw_name.split("."), source.name.split(".")
    above, below = names[:depth], names[depth:]
    while above or steps[0] != below[0]:
        if steps.pop(0) == next(iter(above), None):
            above.pop(0)
    raw = ".".join(steps)
    return source if raw == source.raw_name else replace(source, raw_name=raw)


def model_part(view: View, name: str, path: str, dtype: str) -> Part:
    """The part for a module saved in full: the tensors that `save_pretrained` writes, or all of a
    plain module.
    """
    library = library_of(view.module)
    hugging_face = library is TRANSFORMERS
    _refuse_unserialisable(view.module)
    kept, ties, notes = _without_aliases(view, hugging_face)
    if hugging_face:
        entries = converted_entries(view.module, kept)
    else:
        entries = [unchanged_entry(own_name, source) for own_name, source in kept.items()]
    kind, file = ("module", MODEL_FILE) if library is None else ("model", library.model_file)
    doubtful = tuple(diverged_ties(view)) if hugging_face else ()
    made = cast_entries(entries, view.module, dtype)
    taken = {source.key for source in kept.values()}
    omitted = tuple(source for source in view.sources.values() if source.key not in taken)
    extra = (
        dump_object(dict(view.extra), name or type(view.module).__name__) if view.extra else None
    )
    stored = Part(
        name, path, kind, view.module, made, file=file, ties=ties, doubtful=doubtful, notes=notes
    )
    notes += _rounded_by_others(stored) if hugging_face else ()
    return replace(
        stored,
        omitted=omitted,
        extra=extra,
        notes=notes,
        tensors=view.sources if hugging_face else {},
    )


def _rounded_by_others(part: Part) -> tuple[str, ...]:
    """A note on tensors that plain `from_pretrained` rounds, because it loads all in the config's
    dtype.
    """
    main = dtype_of(main_dtype(part))
    kept = kept_in_float32(part.module, main)
    floats = [entry for entry in part.entries if entry.dtype.is_floating_point]
    wide = [entry.name for entry in floats if entry.dtype.itemsize > main.itemsize]
    rounded = [name for name in wide if not set(kept).intersection(name.split("."))]
    note = (
        f"in more than the config's {dtype_name(main)}, to which plain from_pretrained rounds; "
        "load_model does not"
    )
    return (f"{listing(rounded, ', ')}: {note}",) if rounded else ()


def is_pretrained(module: nn.Module) -> bool:
    """Whether it is a transformers model."""
    return library_of(module) is TRANSFORMERS


def made_by_class(module: Any) -> frozenset[str]:
    """Names of tensors that a transformers model does not save but recomputes when it is loaded,
    such as sines.
    """
    return (
        frozenset(getattr(module, "_keys_to_ignore_on_save", None) or ())
        if is_pretrained(module)
        else frozenset()
    )


def without_own_layouts(parts: Sequence[Part], is_run: bool) -> list[Part]:
    """The parts of a run's checkpoint, with a note on each module that has its own
    `save_pretrained`.

    Such classes (SentenceTransformer, wrappers with a value head) read only the layout that they
    write. Unless `is_run`, raises SelectionError naming them, or PEFT models whose adapters PEFT
    cannot load.
    """
    stacked = {
        type(part.module).__name__: None
        for part in parts
        if part.kind == "adapter" and _is_stacked(part.module)
    }
    if stacked and not is_run:
        raise SelectionError(
            f"{', '.join(stacked)}: adapters of several methods, or around a model that has its "
            "own, are in no layout that PEFT or load_model reads; put all on one PeftModel with "
            "add_adapter(), merge the inner ones with merge_and_unload(), or save a checkpoint to "
            "resume from with save_state()"
        )
    own = {
        id(part): type(part.module).__name__
        for part in parts
        if part.kind == "module" and callable(getattr(type(part.module), "save_pretrained", None))
    }
    if own and not is_run:
        inside = [path for part in parts if id(part) in own for path in _pretrained_below(part)]
        asked = repr(inside[0] if len(inside) == 1 else inside)
        names, way = (
            ", ".join(own.values()),
            f", or what is inside with attribute={asked}" if inside else "",
        )
        raise SelectionError(
            f"{names}: has a layout of its own, which this would not be; save it with "
            f"model.save_pretrained(...){way}, or a checkpoint to resume from with save_state()"
        )
    note = (
        "{}: stored as a plain module; its own from_pretrained reads the layout of its "
        "save_pretrained() alone"
    )
    return [
        replace(p, notes=(*p.notes, note.format(own[id(p)]))) if id(p) in own else p for p in parts
    ]


def _is_stacked(module: nn.Module) -> bool:
    """Whether it is a PeftMixedModel, or contains a PeftModel."""
    inner = {
        cls.__name__
        for child in module.modules()
        if child is not module
        for cls in type(child).__mro__
    }
    return "PeftModel" in inner or any(
        cls.__name__ == "PeftMixedModel" for cls in type(module).__mro__
    )


def _pretrained_below(part: Part) -> list[str]:
    """Paths of the outermost models of known libraries in the part's module."""
    found: list[str] = []
    for path, _, inner in walk_modules(part.module):
        if library_of(inner) is not None and not any(
            path.startswith(f"{outer}.") for outer in found
        ):
            found.append(path)
    return [f"{part.name}.{path}" if part.name else path for path in found]


def diverged_ties(view: View) -> list[tuple[Source, Source]]:
    """Pairs (alias, main) that the model declares tied but that are two tensors in memory; compared
    at the save.
    """
    declared = getattr(view.module, "all_tied_weights_keys", None) or {}
    patterns = _alias_patterns(view.module) if declared else []
    tied = [pair for pair in declared.items() if _is_alias(pair[0], patterns)]
    pairs = [(view.sources.get(one), view.sources.get(other)) for one, other in tied]
    return [(a, b) for a, b in pairs if a is not None and b is not None and a.key != b.key]


def _refuse_unserialisable(module: Any) -> None:
    """Raise SelectionError for quantisers whose weights are tensor subclasses (torchao) or not
    serialisable.
    """
    quantizer = getattr(module, "hf_quantizer", None)
    if quantizer is None:
        return
    makes = (
        cls.__name__
        for cls in type(quantizer).__mro__
        if "get_state_dict_and_metadata" in vars(cls)
    )
    if next(makes, "HfQuantizer") != "HfQuantizer" or not quantizer.is_serializable():
        raise SelectionError(
            f"{type(module).__name__}: its quantised weights ({type(quantizer).__name__}) cannot "
            "be stored as they are; save the adapter alone with adapter_only=True, or dequantise "
            "the model first"
        )


def _without_aliases(
    view: View, hugging_face: bool
) -> tuple[dict[str, Source], tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """The tensors to store by name, the ties and notes.

    Ties are found by parameter identity, never by storage.
    """
    ignored = made_by_class(view.module) if hugging_face else ()
    names = [
        name for name, source in view.sources.items() if name not in ignored or source.trainable
    ]
    has_ties = len({view.sources[name].key for name in names}) < len(names)
    groups: dict[int, list[str]] = {}
    for name in names if has_ties else ():
        groups.setdefault(view.sources[name].key, []).append(name)
    dropped: set[str] = set()
    ties, notes = [], []
    patterns = _alias_patterns(view.module) if hugging_face and has_ties else []
    for group in (group for group in groups.values() if len(group) > 1):
        keep = group[:1]
        if hugging_face:  # the names that transformers does not tie to another one
            keep = [name for name in group if not _is_alias(name, patterns)] or [max(group)]
        ties.append((keep[0], *(name for name in group if name != keep[0])))
        dropped.update(name for name in group if name not in keep)
        if len(keep) > 1:
            notes.append(
                f"{', '.join(keep)}: tied in memory but not by the model's class and config, "
                "stored once each"
            )
    for one, other in diverged_ties(view) if hugging_face else ():
        alias = next(name for name in view.sources if view.sources[name] is one)
        main = next(name for name in view.sources if view.sources[name] is other)
        if alias not in dropped and main not in dropped:
            dropped.add(alias)  # the saver compares the two before it commits
            ties.append((main, alias))
    return (
        {name: view.sources[name] for name in names if name not in dropped},
        tuple(ties),
        tuple(notes),
    )


def _is_alias(name: str, patterns: Sequence[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def _alias_patterns(module: nn.Module) -> list[str]:
    """Patterns of the names that transformers, by the config, ties to others when it loads
    `module`.

    It does not tie again parameters that were tied by hand: a name in no file would be initialised
    randomly.
    """
    return [
        f"{re.escape(path)}\\.{key}" if path else key
        for path, _, inner in walk_modules(module)
        # From the class or the instance dict: `getattr` of an absent attribute of a module is slow,
        # and most lack it.
        for key in vars(inner).get(
            "_tied_weights_keys", getattr(type(inner), "_tied_weights_keys", None)
        )
        or ()
        if getattr(getattr(inner, "config", None), "tie_word_embeddings", False)
    ]
