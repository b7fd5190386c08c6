"""Chooses the tensors that are stored for each adapter of a model.

These are the tensors that PEFT selects, tensors of the base that were trained or resized, and
tensors of the base that its files lack.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ft_ckpt.errors import IncompleteError, NotAnAdapterError, SelectionError, listing
from ft_ckpt.model.base import absent_parameters, resized_embeddings
from ft_ckpt.model.parts.peft_selection import adapter_entries
from ft_ckpt.model.tensors import (
    ADAPTER_FILE,
    PREFIX,
    Entry,
    Part,
    View,
    cast_entries,
    entries_of_base,
    is_peft_model,
    model_below,
    unchanged_entry,
)
from ft_ckpt.ranks.sharding import Source


def adapter_parts(
    view: View,
    name: str,
    path: str,
    dtype: str,
    in_folders: bool = False,
    *,
    with_absent: bool = True,
) -> list[Part]:
    """Make the parts of the adapters of `view`, one part each.

    If `in_folders`, the base is stored in the same checkpoint, and an adapter is in the folder
    `path`/adapters/NAME. Otherwise the adapter is stored alone, in `path`/NAME. Then the adapter
    "default" is in `path` itself, as PEFT does it.

    An adapter that is stored alone also gets the parameters that the files of its base lack, unless
    `with_absent` is False.

    Raises NotAnAdapterError when the module has no adapter, SelectionError when an adapter has
    non-tensor state or is drawn again at each load, IncompleteError when an adapter has no tensors.
    """
    if not view.has_adapters:
        raise NotAnAdapterError(
            f"adapter_only=True: {type(view.module).__name__} has no PEFT adapter; wrap it with "
            "peft.get_peft_model, inject one, or save with adapter_only=False"
        )

    _refuse_redrawn(view.module)
    _refuse_extra(view)
    selected = {adapter: adapter_entries(view, adapter) for adapter in view.module.peft_config}
    base_entries, notes = _changed_base_entries(view, selected)
    absent_entries: list[Entry] = []
    if not in_folders:
        notes += _notes_on_extra(view)
    if with_absent and not in_folders:
        absent_entries, absent_notes = _absent_entries(view)
        notes += absent_notes

    active = view.active_adapters
    omitted = tuple(_frozen_adapter_tensors(view))
    parts = []
    for adapter, entries in selected.items():
        stored = list(entries)
        if adapter in active or not active:
            stored += base_entries
        stored_names = {entry.name for entry in stored}
        lacking = [entry for entry in absent_entries if entry.name not in stored_names]
        if in_folders:
            subfolder = adapter
            folder = _joined(path, "adapters", adapter)
        else:
            subfolder = "" if adapter == "default" else adapter
            folder = _joined(path, subfolder)

        part = Part(
            _joined(name, subfolder),
            folder,
            "adapter",
            view.module,
            cast_entries([*stored, *lacking], view.module, dtype),
            file=ADAPTER_FILE,
            adapter=adapter,
            active=adapter in active,
            base_is_stored=in_folders,
            base=_frozen_base(view, [*base_entries, *lacking]),
            notes=(*notes, *map(_note_on_lacking, lacking)),
            omitted=omitted,
        )
        if not part.entries:
            raise IncompleteError(
                f"adapter {adapter!r}: PEFT selects no tensors for it; nothing is written"
            )

        parts.append(part)

    return parts


def _joined(*steps: str) -> str:
    return "/".join(step for step in steps if step)


def _notes_on_extra(view: View) -> list[str]:
    notes = []
    for name, _ in entries_of_base(view.module, view.extra):
        notes.append(f"{name}: state of the base that is no tensor, not in an adapter's file")
    return notes


def _frozen_adapter_tensors(view: View) -> list[Source]:
    """Return the frozen tensors of adapters, which PEFT leaves out of its files."""
    base_ids = {id(source) for _, source in view.base_sources()}
    frozen_sources = []
    for source in view.sources.values():
        if id(source) not in base_ids and not source.trainable:
            frozen_sources.append(source)
    return frozen_sources


def why_redrawn(adapter: str, config: Any) -> str:
    """Return why PEFT draws random numbers for an adapter of this config each time it is made.

    The file of such an adapter lacks these numbers. Returns "" for any other adapter.
    """
    # Only the method UniLora has these two settings.
    if getattr(config, "proj_seed", 0) is None and not getattr(config, "save_indices", True):
        return (
            f"adapter {adapter!r}: proj_seed is None and save_indices is off, make it with one of "
            "them"
        )
    return ""


def _refuse_redrawn(module: Any) -> None:
    reasons = [why_redrawn(adapter, config) for adapter, config in module.peft_config.items()]
    redrawn = listing([reason for reason in reasons if reason])
    if redrawn:
        raise SelectionError(f"{redrawn}; its file would be another adapter at each load")


def _refuse_extra(view: View) -> None:
    """Raise SelectionError for non-tensor state of an adapter, which PEFT's file cannot store."""
    names = {name: name for name in view.extra}
    base_names = {name for _, name in entries_of_base(view.module, names)}
    adapter_names = sorted(names.keys() - base_names)
    if adapter_names:
        raise SelectionError(
            f"{listing(adapter_names, ', ')}: state of an adapter that is no tensor has no place "
            "in its file; save the run with save_state(), which keeps it"
        )


def _frozen_base(view: View, stored: Sequence[Entry]) -> dict[str, Any]:
    """Return the frozen tensors of the base that are not stored with the adapter, by base name."""
    stored_ids = {id(entry.source) for entry in stored}
    frozen_sources = {}
    for name, source in view.base_sources():
        if not source.trainable and id(source) not in stored_ids:
            frozen_sources[name] = source
    return frozen_sources


def _note_on_lacking(entry: Entry) -> str:
    return f"{entry.name}: saved with the adapter because the base's files lack it"


def _changed_base_entries(
    view: View, selected: Mapping[str, Sequence[Entry]]
) -> tuple[list[Entry], list[str]]:
    """Return the trained tensors and resized embeddings of the base that PEFT does not select.

    They are stored with the adapter. Also returns a note for each.
    """
    stored_keys: set[int] = set()
    for entries in selected.values():
        for entry in entries:
            stored_keys.update(source.key for source in entry.sources)

    resized = resized_embeddings(view, model_below(view.module))
    prefix = "" if is_peft_model(view.module) else PREFIX
    base_ids = {id(source) for _, source in view.base_sources()}
    base_entries: list[Entry] = []
    notes: list[str] = []
    for name, source in view.sources.items():
        if id(source) not in base_ids or source.key in stored_keys:
            continue
        if source.trainable or name in resized:
            base_entries.append(unchanged_entry(prefix + name, source))
            stored_keys.add(source.key)
            reason = "trained" if source.trainable else "resized"
            notes.append(f"{name}: saved with the adapter because it was {reason}")

    return base_entries, notes


def _absent_entries(view: View) -> tuple[list[Entry], list[str]]:
    """Return the parameters that the files of the base lack, under the names that PEFT loads.

    They are random at each load, for example the head of a classifier on a causal model. Also
    returns notes. If the files lack all parameters, they are those of another model, so none is
    returned, and a note says so.
    """
    base = dict(view.base_sources())
    model = model_below(view.module)
    base_ids = []
    for config in view.module.peft_config.values():
        base_ids.append((config.base_model_name_or_path, config.revision))
    base_ids.append((getattr(model, "name_or_path", None), None))
    absent = absent_parameters(model, base, [base_id for base_id in base_ids if base_id[0]])
    if absent and absent >= {name for name, source in base.items() if source.is_parameter}:
        note = (
            f"{type(model).__name__}: none of its parameters is in the files of the base that the "
            "adapter names; load the adapter with base= and this model"
        )
        return [], [note]

    prefix = "" if is_peft_model(view.module) else PREFIX
    entries = []
    for name in sorted(absent):
        steps = [step for step in base[name].name.split(".") if step != "original_module"]
        entries.append(unchanged_entry(prefix + ".".join(steps), base[name]))

    return entries, []


def missing_trainable(view: View, parts: Iterable[Part]) -> list[str]:
    """Return the names of the trainable tensors that none of `parts` stores."""
    stored: set[int] = set()
    for part in parts:
        for entry in part.entries:
            stored.update(source.key for source in entry.sources)
    missing = []
    for name, source in view.sources.items():
        if source.trainable and source.key not in stored:
            missing.append(name)
    return missing


def check_complete(view: View, parts: list[Part]) -> None:
    """Raise IncompleteError naming every trainable tensor that no adapter part stores."""
    missing = missing_trainable(view, parts)
    if missing:
        raise IncompleteError(
            f"{listing(missing, ', ')}: trained, but in no adapter's selection; save with "
            "adapter_only=False, or freeze them"
        )
