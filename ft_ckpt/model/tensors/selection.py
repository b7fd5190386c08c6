"""Selects the tensors of a save and their names: whole models, submodels, plain modules.

Works on names, shapes and dtypes only, without reading a tensor or communicating. The result is a
list of parts, each a loadable folder, whose entries name the source of every stored tensor.
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
    """Return the attribute of `module` under a dotted name; None if there is none."""
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
    """Make the part for a module saved in full.

    It has the tensors that `save_pretrained` writes, or all of a plain module.
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
        doubtful=tuple(diverged_ties(view)),
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
    """Note the tensors that plain `from_pretrained` rounds: it loads all in the config's dtype."""
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
    """Check whether it is a transformers model."""
    return library_of(module) is TRANSFORMERS


def made_by_class(module: Any) -> frozenset[str]:
    """Name the tensors that a transformers model recomputes when it is loaded, such as sines.

    It does not save them.
    """
    if not is_pretrained(module):
        return frozenset()
    return frozenset(getattr(module, "_keys_to_ignore_on_save", None) or ())


def without_own_layouts(parts: Sequence[Part], is_run: bool) -> list[Part]:
    """Return the parts, with a note on each module that has its own `save_pretrained`.

    Such classes (SentenceTransformer, wrappers with a value head) read only the layout that they
    write. Unless `is_run`, raises SelectionError naming them, or PEFT models whose adapters PEFT
    cannot load.
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
    """Check whether it is a PeftMixedModel, or contains a PeftModel."""
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
    """Raise SelectionError for quantisers whose weights cannot be stored.

    Those of torchao are tensor subclasses, others are not serialisable.
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
    """Check whether the quantiser describes its tensors itself, instead of by the base class."""
    for cls in type(quantizer).__mro__:
        if "get_state_dict_and_metadata" in vars(cls):
            return cls.__name__ != "HfQuantizer"
    return False


@dataclass(frozen=True, eq=False)
class _Selection:
    """The tensors of a module to store by name, without second names of one tensor."""

    sources: Mapping[str, Source]
    ties: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def omitted_from(self, view: View) -> tuple[Source, ...]:
        keys = {source.key for source in self.sources.values()}
        return tuple(source for source in view.sources.values() if source.key not in keys)


def _tied_names(view: View, names: Sequence[str]) -> list[list[str]]:
    """Return the names of each tensor that has several.

    Ties are found by parameter identity, never by storage.
    """
    groups: dict[int, list[str]] = {}
    for name in names:
        groups.setdefault(view.sources[name].key, []).append(name)
    if len(groups) == len(names):
        return []
    return [group for group in groups.values() if len(group) > 1]


def _without_aliases(view: View) -> _Selection:
    """Select all tensors of a plain module, under their first names."""
    ties = [tuple(group) for group in _tied_names(view, list(view.sources))]
    sources = dict(view.sources)
    for _, *aliases in ties:
        for alias in aliases:
            del sources[alias]
    return _Selection(sources, tuple(ties))


def _without_class_aliases(view: View) -> _Selection:
    """Select the tensors of a transformers model by the names that its class ties to no others."""
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
        alias, main = name_of[id(alias_source)], name_of[id(main_source)]
        if alias not in dropped and main not in dropped:
            dropped.add(alias)  # the saver compares the two before it commits
            ties.append((main, alias))
    sources = {name: view.sources[name] for name in names if name not in dropped}
    return _Selection(sources, tuple(ties), tuple(notes))


def diverged_ties(view: View) -> list[tuple[Source, Source]]:
    """Return pairs (alias, main) that the model declares tied but that are two tensors in memory.

    Compared at the save.
    """
    declared = getattr(view.module, "all_tied_weights_keys", None) or {}
    patterns = _alias_patterns(view.module) if declared else []
    pairs = []
    for alias, main in declared.items():
        alias_source, main_source = view.sources.get(alias), view.sources.get(main)
        if alias_source is None or main_source is None or not _is_alias(alias, patterns):
            continue
        if alias_source.key != main_source.key:
            pairs.append((alias_source, main_source))
    return pairs


def _is_alias(name: str, patterns: Sequence[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def _alias_patterns(module: nn.Module) -> list[str]:
    """Return patterns of the names that transformers ties to others when it loads `module`.

    The config decides. transformers does not tie again parameters that were tied by hand: a name in
    no file would be initialised randomly.
    """
    patterns = []
    for path, _, inner in walk_modules(module):
        # From the class or the instance dict: `getattr` of an absent attribute of a module is slow,
        # and most lack it.
        class_keys = getattr(type(inner), "_tied_weights_keys", None)
        keys = vars(inner).get("_tied_weights_keys", class_keys) or ()
        config = getattr(inner, "config", None) if keys else None
        if getattr(config, "tie_word_embeddings", False):
            patterns += [f"{re.escape(path)}\\.{key}" if path else key for key in keys]
    return patterns
