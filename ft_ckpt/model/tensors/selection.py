"""Selects the tensors that a save stores of a whole model or module, and their stored names.

Works on names, shapes and dtypes only. No tensor is read, and ranks do not communicate. The result
is a part, whose entries say from which tensor of the live model each stored tensor is made.

Tied tensors are one parameter under several names. One name is stored, and the part records the
others, its aliases.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ft_ckpt.errors import SelectionError, listing
from ft_ckpt.formats import dtype_name, dtype_of
from ft_ckpt.formats.trees import dump_object
from ft_ckpt.model.tensors.conversion import cast_entries, converted_entries, kept_in_float32
from ft_ckpt.model.tensors.entries import MODEL_FILE, Part, unchanged_entry
from ft_ckpt.model.tensors.libraries import TRANSFORMERS, library_of
from ft_ckpt.model.tensors.view import View
from ft_ckpt.ranks.sharding import Source
from ft_ckpt.ranks.wrappers import walk_modules


def tensor_at(module: nn.Module, name: str) -> Any:
    """Return the attribute of `module` under a dotted name, or None if there is none."""
    path, _, key = name.rpartition(".")
    try:
        return getattr(module.get_submodule(path), key)
    except AttributeError:
        return None


def put_at(module: nn.Module, name: str, value: Any) -> None:
    """Put a parameter or buffer under a dotted name."""
    path, _, key = name.rpartition(".")
    setattr(module.get_submodule(path), key, value)


def model_part(view: View, name: str, path: str, dtype: str) -> Part:
    """Make the part of a module that is saved in full.

    For a model of a library, it has the tensors that `save_pretrained` writes. For a plain module,
    it has all tensors.
    """
    _refuse_unserialisable(view.module)
    library = library_of(view.module)
    if library is TRANSFORMERS:
        part = _transformers_part(view, name, path, dtype)
    else:
        part = _plain_part(view, name, path, dtype)
        if library is not None:
            part = replace(part, kind="model", file=library.model_file)
    if view.extra:
        text = dump_object(dict(view.extra), name or type(view.module).__name__)
        part = replace(part, extra=text)
    return part


def _transformers_part(view: View, name: str, path: str, dtype: str) -> Part:
    selection = _without_class_aliases(view)
    entries = converted_entries(view.module, selection.sources)
    part = Part(
        name,
        path,
        "model",
        view.module,
        cast_entries(entries, view.module, dtype),
        file=TRANSFORMERS.model_file,
        ties=selection.ties,
        diverged_ties=tuple(diverged_ties(view)),
        tensors=view.sources,
        omitted=selection.omitted_from(view),
    )
    return replace(part, notes=(*selection.notes, *_rounded_by_others(part)))


def _plain_part(view: View, name: str, path: str, dtype: str) -> Part:
    selection = _without_aliases(view)
    entries = [unchanged_entry(name, source) for name, source in selection.sources.items()]
    return Part(
        name,
        path,
        "module",
        view.module,
        cast_entries(entries, view.module, dtype),
        file=MODEL_FILE,
        ties=selection.ties,
        omitted=selection.omitted_from(view),
    )


def _rounded_by_others(part: Part) -> tuple[str, ...]:
    """Return a note on the tensors that transformers' own `from_pretrained` would round.

    It loads all tensors in the dtype of the config.
    """
    main = dtype_of(part.main_dtype)
    wide_steps = set(kept_in_float32(part.module, main))
    rounded = []
    for entry in part.entries:
        is_wide = entry.dtype.is_floating_point and entry.dtype.itemsize > main.itemsize
        if is_wide and wide_steps.isdisjoint(entry.name.split(".")):
            rounded.append(entry.name)

    if not rounded:
        return ()
    note = (
        f"{listing(rounded, ', ')}: in more than the config's {dtype_name(main)}, to which plain "
        "from_pretrained rounds; load_model does not"
    )
    return (note,)


def is_pretrained(module: nn.Module) -> bool:
    """Check whether a module is a model of transformers."""
    return library_of(module) is TRANSFORMERS


def made_by_class(module: Any) -> frozenset[str]:
    """Return the names of tensors that a transformers model does not save.

    It computes them when it is loaded, for example sines of positions.
    """
    if not is_pretrained(module):
        return frozenset()
    return frozenset(getattr(module, "_keys_to_ignore_on_save", None) or ())


def without_own_layouts(parts: Sequence[Part], is_run: bool) -> list[Part]:
    """Refuse modules that read only a layout of their own, unless it is a checkpoint of a run.

    These are classes with their own `save_pretrained`, such as SentenceTransformer or wrappers with
    a value head. Also refuses PEFT models whose adapters PEFT cannot load. Raises SelectionError
    naming them. If `is_run`, returns the parts with a note on each such class instead.
    """
    if not is_run:
        _refuse_stacked(parts)
        _refuse_own_layouts(parts)

    note = (
        "stored as a plain module; its own from_pretrained reads the layout of its "
        "save_pretrained() alone"
    )
    noted = []
    for part in parts:
        if _has_own_layout(part):
            class_name = type(part.module).__name__
            part = replace(part, notes=(*part.notes, f"{class_name}: {note}"))
        noted.append(part)

    return noted


def _has_own_layout(part: Part) -> bool:
    save_pretrained = getattr(type(part.module), "save_pretrained", None)
    return part.kind == "module" and callable(save_pretrained)


def _refuse_stacked(parts: Sequence[Part]) -> None:
    classes: dict[str, None] = {}
    for part in parts:
        if part.kind == "adapter" and _is_stacked(part.module):
            classes[type(part.module).__name__] = None
    if classes:
        raise SelectionError(
            f"{', '.join(classes)}: adapters of several methods, or around a model that has its "
            "own, are in no layout that PEFT or load_model reads; put all on one PeftModel with "
            "add_adapter(), merge the inner ones with merge_and_unload(), or save a checkpoint to "
            "resume from with save_state()"
        )


def _is_stacked(module: nn.Module) -> bool:
    """Check whether a module is a PeftMixedModel, or contains a PeftModel."""
    if "PeftMixedModel" in _class_names(module):
        return True
    for child in module.modules():
        if child is not module and "PeftModel" in _class_names(child):
            return True
    return False


def _class_names(module: nn.Module) -> list[str]:
    return [cls.__name__ for cls in type(module).__mro__]


def _refuse_own_layouts(parts: Sequence[Part]) -> None:
    refused = [part for part in parts if _has_own_layout(part)]
    if not refused:
        return
    names = ", ".join(type(part.module).__name__ for part in refused)
    inner: list[str] = []
    for part in refused:
        inner += _pretrained_below(part)
    remedy = ""
    if inner:
        attribute = inner[0] if len(inner) == 1 else inner
        remedy = f", or what is inside with attribute={attribute!r}"

    raise SelectionError(
        f"{names}: has a layout of its own, which this would not be; save it with "
        f"model.save_pretrained(...){remedy}, or a checkpoint to resume from with save_state()"
    )


def _pretrained_below(part: Part) -> list[str]:
    """Return the paths of the outermost models of known libraries in the part's module."""
    paths: list[str] = []
    for path, _, module in walk_modules(part.module):
        is_inner = any(path.startswith(f"{outer}.") for outer in paths)
        if library_of(module) is not None and not is_inner:
            paths.append(path)
    return [f"{part.name}.{path}" if part.name else path for path in paths]


def _refuse_unserialisable(module: Any) -> None:
    """Raise SelectionError for a quantised model whose weights cannot be stored.

    The weights are tensor subclasses (torchao), or its quantiser says that they cannot be stored.
    """
    quantizer = getattr(module, "hf_quantizer", None)
    if quantizer is None:
        return
    if _makes_subclasses(quantizer) or not quantizer.is_serializable():
        raise SelectionError(
            f"{type(module).__name__}: its quantised weights ({type(quantizer).__name__}) cannot "
            "be stored as they are; save the adapter alone with adapter_only=True, or dequantise "
            "the model first"
        )


def _makes_subclasses(quantizer: Any) -> bool:
    """Check whether the weights are tensor subclasses.

    Their quantiser overrides `get_state_dict_and_metadata` of the base class.
    """
    for cls in type(quantizer).__mro__:
        if "get_state_dict_and_metadata" in vars(cls):
            return cls.__name__ != "HfQuantizer"
    return False


@dataclass(frozen=True, eq=False)
class _Selection:
    """Tensors of a module to store, each under one name.

    Attributes:
        sources: the tensors, by stored name.
        ties: names of each tied tensor. The first one is the stored name.
        notes: texts for the report of the save.
    """

    sources: Mapping[str, Source]
    ties: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def omitted_from(self, view: View) -> tuple[Source, ...]:
        """Return the tensors of `view` that are stored under none of their names."""
        keys = {source.key for source in self.sources.values()}
        return tuple(source for source in view.sources.values() if source.key not in keys)


def _tied_names(view: View, names: Sequence[str]) -> list[list[str]]:
    """Return the names of each tensor that has several names.

    Two names are tied if they are the same parameter. Parameters that only share memory are not.
    """
    groups: dict[int, list[str]] = {}
    for name in names:
        groups.setdefault(view.sources[name].key, []).append(name)
    if len(groups) == len(names):
        return []
    return [group for group in groups.values() if len(group) > 1]


def _without_aliases(view: View) -> _Selection:
    """Select all tensors of a plain module, each under its first name."""
    ties = [tuple(group) for group in _tied_names(view, list(view.sources))]
    sources = dict(view.sources)
    for _, *aliases in ties:
        for alias in aliases:
            del sources[alias]
    return _Selection(sources, tuple(ties))


def _without_class_aliases(view: View) -> _Selection:
    """Select the tensors of a transformers model, under the names that `from_pretrained` needs.

    These are the names that the class does not tie to others when it loads the model. Tensors that
    the class computes at a load are left out, unless they are trained.
    """
    recomputed = made_by_class(view.module)
    names = []
    for name, source in view.sources.items():
        if name not in recomputed or source.trainable:
            names.append(name)

    groups = _tied_names(view, names)
    patterns = _alias_patterns(view.module) if groups else []
    dropped: set[str] = set()
    ties, notes = [], []
    for group in groups:
        stored = [name for name in group if not _is_alias(name, patterns)] or [max(group)]
        ties.append((stored[0], *(name for name in group if name != stored[0])))
        dropped.update(name for name in group if name not in stored)
        if len(stored) > 1:
            notes.append(
                f"{', '.join(stored)}: tied in memory but not by the model's class and config, "
                "stored once each"
            )

    name_of: dict[int, str] = {}
    for name, source in view.sources.items():
        name_of.setdefault(id(source), name)
    for alias_source, main_source in diverged_ties(view):
        alias = name_of[id(alias_source)]
        main = name_of[id(main_source)]
        if alias not in dropped and main not in dropped:
            # The save compares the values of both before it commits.
            dropped.add(alias)
            ties.append((main, alias))

    sources = {name: view.sources[name] for name in names if name not in dropped}
    return _Selection(sources, tuple(ties), tuple(notes))


def diverged_ties(view: View) -> list[tuple[Source, Source]]:
    """Return pairs (alias, main) of different tensors that the class declares tied.

    The save compares their values.
    """
    declared = getattr(view.module, "all_tied_weights_keys", None) or {}
    patterns = _alias_patterns(view.module) if declared else []
    pairs = []
    for alias, main in declared.items():
        alias_source = view.sources.get(alias)
        main_source = view.sources.get(main)
        if alias_source is None or main_source is None or not _is_alias(alias, patterns):
            continue
        if alias_source.key != main_source.key:
            pairs.append((alias_source, main_source))
    return pairs


def _is_alias(name: str, patterns: Sequence[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def _alias_patterns(module: nn.Module) -> list[str]:
    """Return patterns of the names that transformers ties to others when it loads `module`.

    The class and its config decide which. transformers does not tie parameters again that a script
    has tied. If such a name were in no file, transformers would initialise it randomly.
    """
    patterns = []
    for path, _, inner in walk_modules(module):
        # Most modules lack the attribute, and `getattr` of an absent attribute of a module is slow.
        # So the class and the dict of the instance are looked at.
        class_keys = getattr(type(inner), "_tied_weights_keys", None)
        keys = vars(inner).get("_tied_weights_keys", class_keys) or ()
        config = getattr(inner, "config", None) if keys else None
        if getattr(config, "tie_word_embeddings", False):
            patterns += [f"{re.escape(path)}\\.{key}" if path else key for key in keys]
    return patterns
