"""The tensors of an adapter: those that PEFT loads, other trained parameters, added embedding rows.

PEFT selects the names, method by method. It gets placeholders instead of tensors, under their names
in the module tree (wrapper steps included), so nothing is gathered for it. Trained or resized
tensors that PEFT leaves out are added.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ft_ckpt.checkpoint import DIFFUSERS_LORA_FILE, PartRecord
from ft_ckpt.errors import IncompleteError, NotAnAdapterError, SelectionError, listing, shown
from ft_ckpt.model.base_files import absent_parameters, config_in_files
from ft_ckpt.model.conversion import cast_entries
from ft_ckpt.model.entries import Entry, Group, Part, unchanged_entry
from ft_ckpt.model.libraries import ADAPTER_FILE, PREFIX
from ft_ckpt.model.on_meta import Shapes, read_config, tensors_made
from ft_ckpt.model.selection import View
from ft_ckpt.ranks import Source, shallow_copy, unwrap, user_class, walk_modules, wrapper_steps


def resized_embeddings(view: View, model: Any) -> set[str]:
    """Names of embedding weights with another number of rows than the loaded base had; `model`: the
    base model.
    """
    module: Any = view.module
    if not hasattr(model, "get_input_embeddings") or not hasattr(model, "config"):
        return set()
    layers = [
        embedding_of(model, getter) for getter in ("get_input_embeddings", "get_output_embeddings")
    ]
    embeddings = {id(layer) for layer in layers if layer is not None}
    paths = (path for path, _, inner in walk_modules(module) if id(inner) in embeddings)
    names = [name for path in paths if (name := f"{path}.weight") in view.sources]
    rows = _rows_of_base(module, model)
    suspected = [name for name in names if rows is not None and view.sources[name].shape[0] != rows]
    if not suspected:
        return set()
    # A class may make more rows than its config has words, as Molmo2's does.
    made = _shapes_with_words(user_class(type(model)), model.config.to_json_string(), rows)
    base_names = {id(source): name for name, source in base_sources(view)}
    return {
        name
        for name in suspected
        if view.sources[name].shape != made.get(base_names[id(view.sources[name])])
    }


@lru_cache(4)  # the model is made once for all saves of a run
def _shapes_with_words(cls: type, config: str, words: int) -> Shapes:
    """The shapes that the class makes of a config with another number of words; empty if it makes
    no model of it.
    """
    try:
        changed = read_config(cls.config_class, config)  # type: ignore[attr-defined]  # of transformers' classes
        changed.get_text_config().vocab_size = words
        return tensors_made(cls, changed, {})[0]
    except Exception:  # noqa: BLE001 - anything that a class of a script raises
        return {}


def embedding_of(model: Any, getter: str = "get_input_embeddings") -> Any:
    """The embedding layer of the base, also inside a PEFT layer; None if `getter` finds none."""
    try:
        layer = getattr(model, getter)()
    except (AttributeError, NotImplementedError):
        return None
    while (
        inner := getattr(layer, "base_layer", getattr(layer, "original_module", None))
    ) is not None:
        layer = inner
    return layer


def _rows_of_base(module: Any, model: Any) -> int | None:
    """Vocabulary size of the base before a resize: from its config on this machine, else from the
    inner modules.

    `resize_token_embeddings` changes the config and the outermost module only; the decoder inside
    keeps the old size.
    """
    for config in module.peft_config.values():
        place = getattr(config, "base_model_name_or_path", None)
        if place and (known := _configured_rows(place, model)) is not None:
            return known
    inner = (getattr(child, "vocab_size", None) for child in model.modules() if child is not model)
    return next((rows for rows in inner if isinstance(rows, int)), None)


def _configured_rows(place: str, model: Any) -> int | None:
    config = config_in_files(place)
    if config is None or type(config) is not type(model.config):
        return None
    rows = getattr(config.get_text_config(), "vocab_size", None)
    return rows if isinstance(rows, int) else None


T = TypeVar("T")
TO_BASE = ("base_layer", "original_module")  # the child of a PEFT layer that is the base layer
BASE_STEPS = (*TO_BASE, "token_adapter")  # children of PEFT layers on the path to the base layer


def peft_name(name: str, file: str) -> str:
    """PEFT's name of the tensor `name` of an adapter's weight file `file`, which may be in the
    layout of diffusers.
    """
    if not PurePosixPath(file).name.startswith(DIFFUSERS_LORA_FILE):
        return name
    return PREFIX + name.partition(".")[2]  # without the component of a pipeline


def base_name(stored: str) -> str:
    """The name in the base model of a stored tensor of an adapter: without the steps that PEFT
    adds.
    """
    return ".".join(
        step for step in stored.removeprefix(PREFIX).split(".") if step not in BASE_STEPS
    )


def stored_base_names(record: PartRecord) -> set[str]:
    """The names in the base model of all stored tensors of an adapter; those of base tensors are
    among them.
    """
    return {base_name(peft_name(tensor.name, tensor.file)) for tensor in record.tensors}


def has_adapters(module: nn.Module) -> bool:
    """Whether the module carries PEFT adapters, wrapped in a PeftModel or injected."""
    return bool(getattr(module, "peft_config", None))


def is_peft_model(module: nn.Module) -> bool:
    """Whether the module is a PeftModel, not a model with adapters injected into it."""
    return (
        has_adapters(module) and hasattr(module, "base_model") and hasattr(module, "get_base_model")
    )


def adapter_parts(
    view: View,
    name: str,
    path: str,
    dtype: str,
    in_folders: bool = False,
    *,
    with_absent: bool = True,
) -> list[Part]:
    """One part per adapter, in `path`/NAME or (`in_folders`) `path`/adapters/NAME.

    "default" is in `path` itself, as in PEFT, unless `in_folders`. `with_absent`: without the base
    beside it, an adapter has those parameters of the base that the files of the base lack and the
    adapter does not replace. Raises NotAnAdapterError when the module has none, SelectionError when
    an adapter has non-tensor state or is drawn anew at each load, IncompleteError when it has no
    tensors.
    """
    if not has_adapters(view.module):
        raise NotAnAdapterError(
            f"adapter_only=True: {type(view.module).__name__} has no PEFT adapter; wrap it with "
            "peft.get_peft_model, inject one, or save with adapter_only=False"
        )
    names = list(view.module.peft_config)
    if drawn := listing(
        [why for name in names if (why := why_redrawn(name, view.module.peft_config[name]))]
    ):
        raise SelectionError(f"{drawn}; its file would be another adapter at each load")
    _refuse_extra(view)
    chosen = {adapter: _adapter_entries(view, adapter) for adapter in names}
    extra, notes = _entries_left_out(view, chosen)
    if not in_folders:
        kept = "state of the base that is no tensor, not in an adapter's file"
        notes += tuple(f"{name}: {kept}" for name, _ in _of_base(view, view.extra))
    absent, further = _absent_entries(view) if with_absent and not in_folders else ([], ())
    notes += further
    owned = {id(source) for _, source in base_sources(view)}
    # PEFT omits them
    omitted = tuple(s for s in view.sources.values() if id(s) not in owned and not s.trainable)
    active = active_adapters(view.module)
    parts = []
    for adapter, entries in chosen.items():
        own = "" if adapter == "default" and not in_folders else adapter
        folder = "/".join(filter(None, (path, "adapters" if in_folders else "", own)))
        added = [entry for entry in extra if adapter in active or not active]
        names_of_adapter = {entry.name for entry in (*entries, *added)}
        lacking = [entry for entry in absent if entry.name not in names_of_adapter]
        added_sources = {id(entry.source) for entry in (*extra, *lacking)}
        frozen = {
            n: s for n, s in base_sources(view) if not s.trainable and id(s) not in added_sources
        }
        made = cast_entries([*entries, *added, *lacking], view.module, dtype)
        label = "/".join(filter(None, (name, own)))
        reasons = tuple(
            f"{entry.name}: saved with the adapter because the base's files lack it"
            for entry in lacking
        )
        stored = Part(label, folder, "adapter", view.module, made, file=ADAPTER_FILE, base=frozen)
        stored = replace(stored, notes=notes + reasons)
        parts.append(
            replace(
                stored,
                adapter=adapter,
                active=adapter in active,
                beside=in_folders,
                omitted=omitted,
            )
        )
    empty = [p.adapter for p in parts if not p.entries]
    if empty:
        raise IncompleteError(
            f"adapter {empty[0]!r}: PEFT selects no tensors for it; nothing is written"
        )
    return parts


def active_adapters(module: Any) -> list[str]:
    """Names of the active adapters, of a PeftModel or injected."""
    active = getattr(module, "active_adapters", None)
    if not active or callable(active):
        # Injected: transformers' method raises if PEFT did it, or is older than transformers asks
        # for; the layers know.
        layers = (
            getattr(inner, "active_adapters", None)
            for inner in module.modules()
            if hasattr(inner, "base_layer")
        )
        active = next((names for names in layers if names and not callable(names)), ())
    return [active] if isinstance(active, str) else list(active)


def base_view(view: View) -> View:
    """The base model, with its names from before the adapters were added."""
    return View(
        _model_below(view.module), dict(base_sources(view)), dict(_of_base(view, view.extra))
    )


def _model_below(module: Any) -> Any:
    return module.get_base_model() if is_peft_model(module) else module


def base_sources(view: View) -> Iterable[tuple[str, Source]]:
    """(name in the base model, source) of every tensor of the base model."""
    return _of_base(view, view.sources)


def _of_base(view: View, named: Mapping[str, T]) -> Iterable[tuple[str, T]]:
    """The entries of `named` that belong to the base model, by their names there."""
    wrapped, root = _wrapped_layers(view.module), _root_steps(view.module)
    for name, value in named.items():
        steps = name.split(".")
        if steps[: len(root)] != root:
            continue  # a prompt encoder, a projection shared by all layers
        in_base = _base_steps(steps, wrapped)
        if in_base is not None:
            yield ".".join(in_base[len(root) :]), value


def base_path(view: View, path: str) -> str:
    """The path, in the base model, of the module at `path`, which is not inside a PEFT layer."""
    return ".".join(path.split(".")[len(_root_steps(view.module)) :])


def _root_steps(module: Any) -> list[str]:
    """The steps from a PeftModel to its base; none where adapters are injected."""
    if not is_peft_model(module):
        return []
    return ["base_model", *(["model"] if hasattr(module.base_model, "peft_config") else [])]


def _wrapped_layers(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """The paths of PEFT layers, each with the names of the children that contain base tensors."""
    return {
        path: steps for path, _, inner in walk_modules(module) if (steps := _steps_to_base(inner))
    }


def _steps_to_base(module: nn.Module) -> tuple[str, ...]:
    """The names of the children of a PEFT layer that contain base tensors; () for another
    module.
    """
    from peft.tuners.adaption_prompt.layer import AdaptedAttention, AdaptedAttentionGPT
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
        return BASE_STEPS
    return ("model",) if isinstance(module, (AdaptedAttention, AdaptedAttentionGPT)) else ()


def without_adapters(module: nn.Module) -> nn.Module:
    """The base layer, unwrapped, inside a PEFT layer; any other module unwrapped."""
    module = unwrap(module)
    inner = next(
        (
            child
            for step in _steps_to_base(module)
            if (child := module._modules.get(step)) is not None
        ),
        None,
    )
    return module if inner is None else without_adapters(inner)


def _base_steps(steps: list[str], wrapped: Mapping[str, tuple[str, ...]]) -> list[str] | None:
    """The path without the steps of PEFT layers; None if it belongs to an adapter."""
    kept, path = [], ""
    for step in steps:
        if path in wrapped:
            if step not in wrapped[path]:
                return None
        else:
            kept.append(step)
        path = f"{path}.{step}" if path else step
    return kept


def why_redrawn(name: str, config: Any) -> str:
    """Why PEFT draws other numbers for the adapter each time that it makes it; "" if it does
    not.
    """
    # UniLora
    if getattr(config, "proj_seed", 0) is None and not getattr(config, "save_indices", True):
        return (
            f"adapter {name!r}: proj_seed is None and save_indices is off, make it with one of them"
        )
    return ""


def _refuse_extra(view: View) -> None:
    """Refuse non-tensor state of an adapter, because PEFT's file cannot store it."""
    own = sorted(
        view.extra.keys()
        - {name for _, name in _of_base(view, {name: name for name in view.extra})}
    )
    if own:
        raise SelectionError(
            f"{listing(own, ', ')}: state of an adapter that is no tensor has no place in its "
            "file; save the run with save_state(), which keeps it"
        )


def _adapter_entries(view: View, adapter: str) -> list[Entry]:
    """The tensors that PEFT selects for the adapter, under the names it stores."""
    config = view.module.peft_config[adapter]
    if config.is_prompt_learning:
        return _prompt_entries(view, adapter)
    sources = _sources_for(view, adapter)
    placeholders = {
        source.raw_name: torch.zeros((), dtype=source.dtype, device="cpu").expand(source.shape)
        for source in sources
    }
    stored = _peft_names(view.module, placeholders, adapter)
    origin = {
        id(tensor): source for tensor, source in zip(placeholders.values(), sources, strict=True)
    }
    prefix, clean_name = "" if is_peft_model(view.module) else PREFIX, _name_cleaner(view)
    made = {name: tensor for name, tensor in stored.items() if id(tensor) not in origin}
    group = _computed_group(view, adapter, made)
    return [
        Entry(
            prefix + clean_name(name),
            tuple(tensor.shape),
            tensor.dtype,
            tensor.dtype,
            origin.get(id(tensor)),
            group if name in made else None,
        )
        for name, tensor in stored.items()
    ]


def _sources_for(view: View, adapter: str) -> list[Source]:
    """The tensors of the model without those of its other adapters.

    PEFT matches an adapter's name at any step of a path: for an adapter called "0" it would select
    all of layer 0.
    """
    others, root = set(view.module.peft_config) - {adapter}, _root_steps(view.module)
    wrapped = _wrapped_layers(view.module) if others else {}
    named = ((name.split("."), source) for name, source in view.sources.items())
    return [
        source
        for steps, source in named
        if not others or _adapter_of(steps, wrapped, root) not in others
    ]


def _adapter_of(
    steps: list[str], wrapped: Mapping[str, tuple[str, ...]], root: list[str]
) -> str | None:
    """The adapter's name in a path: after the child of a PEFT layer, or the last step outside the
    base; else None.
    """
    path = ""
    for index, step in enumerate(steps):
        if step not in wrapped.get(path, (step,)):
            return next(iter(steps[index + 1 :]), None)
        path = f"{path}.{step}" if path else step
    return steps[-1] if steps[: len(root)] != root else None


def _name_cleaner(view: View) -> Callable[[str], str]:
    """A function that removes wrapper steps from a name that PEFT derived from a raw name."""
    steps = wrapper_steps((name, source.raw_name) for name, source in view.sources.items())
    return lambda name: ".".join(step for step in name.split(".") if step not in steps)


def _peft_names(module: Any, state_dict: Mapping[str, Tensor], adapter: str) -> dict[str, Tensor]:
    from peft import get_peft_model_state_dict

    # PEFT's "auto" would ask the Hub for the vocabulary of the base; `_entries_left_out` decides
    # instead.
    try:
        result: dict[str, Tensor] = get_peft_model_state_dict(
            _with_one_adapter(module, adapter),
            state_dict=dict(state_dict),
            adapter_name=adapter,
            save_embedding_layers=False,
        )
    except (LookupError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise SelectionError(
            f"adapter {adapter!r}: PEFT cannot select its tensors ({shown(error)}), nor would its "
            "save_pretrained; expected an adapter that PEFT can save; delete_adapter() removes one"
        ) from error
    return result


def _with_one_adapter(module: Any, adapter: str) -> Any:
    """A shallow copy of the module with this adapter alone, and a copy of its config, which PEFT
    modifies.
    """
    owner = copied = shallow_copy(module)
    tuner = module._modules.get("base_model")
    if tuner is not None and getattr(tuner, "peft_config", None):
        owner = shallow_copy(tuner)
        vars(copied)["_modules"] = {**module._modules, "base_model": owner}
    owner.peft_config = {adapter: copy.copy(module.peft_config[adapter])}
    return copied


def _computed_group(view: View, adapter: str, made: Mapping[str, Tensor]) -> Group | None:
    """The group for tensors that PEFT computes when it saves: pruned ranks, top-k indices."""
    if not made:
        return None
    base = {id(source) for _, source in base_sources(view)}
    needed = tuple(source for source in _sources_for(view, adapter) if id(source) not in base)
    prefix, clean_name = "" if is_peft_model(view.module) else PREFIX, _name_cleaner(view)

    def ask_peft(full: dict[str, Tensor]) -> dict[str, Tensor]:
        stored = _peft_names(
            view.module, {source.raw_name: full[source.name] for source in needed}, adapter
        )
        return {
            prefix + clean_name(name): tensor.contiguous()
            for name, tensor in stored.items()
            if name in made
        }

    return Group(needed, ask_peft)


def _prompt_entries(view: View, adapter: str) -> list[Entry]:
    """The entries of a prompt method, which stores the output of its encoder, rebuilt from full
    tensors.
    """
    inside = f"prompt_encoder.{adapter}."
    needed = tuple(source for name, source in view.sources.items() if name.startswith(inside))
    others = {
        name: source
        for name, source in view.sources.items()
        if "modules_to_save" in name.split(".")
    }

    def run_encoder(full: dict[str, Tensor]) -> dict[str, Tensor]:
        encoder = _rebuild_module(
            view.module.prompt_encoder[adapter],
            {s.name[s.name.index(inside) + len(inside) :]: full[s.name] for s in needed},
        )
        model = shallow_copy(view.module)  # only the copy has the rebuilt encoder
        model.__dict__["_modules"] = {
            **model._modules,
            "prompt_encoder": nn.ModuleDict({adapter: encoder}),
        }
        with torch.no_grad():
            stored = _peft_names(
                model, {s.raw_name: torch.zeros(1, device="cpu") for s in others.values()}, adapter
            )
        return {
            name: tensor.detach().contiguous()
            for name, tensor in stored.items()
            if tensor.numel() != 0 and "modules_to_save" not in name
        }

    group = Group(needed, run_encoder)
    made = run_encoder(
        {
            source.name: torch.zeros(source.shape, dtype=source.dtype, device="cpu")
            for source in needed
        }
    )
    entries = [
        Entry(name, tuple(t.shape), t.dtype, t.dtype, group=group) for name, t in made.items()
    ]
    saved = f".modules_to_save.{adapter}."
    return entries + [
        unchanged_entry(n.replace(saved, "."), source) for n, source in others.items() if saved in n
    ]


def _rebuild_module(module: nn.Module, full: Mapping[str, Tensor]) -> nn.Module:
    """A copy of `module` with the tensors `full` as plain parameters; the live module may be
    sharded.
    """
    own = {id(parameter): parameter for parameter in module.parameters()}
    twin = copy.deepcopy(
        module,
        memo={key: nn.Parameter(torch.empty(0, device="cpu"), requires_grad=False) for key in own},
    )
    for name, tensor in full.items():
        path, _, key = name.rpartition(".")
        owner = twin.get_submodule(path)
        owner.__dict__.pop(key, None)
        if key in owner._buffers:
            owner._buffers[key] = tensor
        else:
            owner._parameters[key] = nn.Parameter(tensor, requires_grad=False)
    return twin


def _entries_left_out(
    view: View, chosen: Mapping[str, list[Entry]]
) -> tuple[list[Entry], tuple[str, ...]]:
    """Base tensors to store with the adapter (trained ones, resized embeddings), and notes on
    them.
    """
    taken = {
        source.key for entries in chosen.values() for entry in entries for source in entry.sources
    }
    resized = resized_embeddings(view, _model_below(view.module))
    prefix = "" if is_peft_model(view.module) else PREFIX
    owned = {id(source) for _, source in base_sources(view)}
    extra, notes = [], []
    for name, source in view.sources.items():
        if id(source) not in owned or source.key in taken:
            continue
        if source.trainable or name in resized:
            extra.append(unchanged_entry(prefix + name, source))
            taken.add(source.key)
            notes.append(
                f"{name}: saved with the adapter because it was "
                f"{'trained' if source.trainable else 'resized'}"
            )
    return extra, tuple(notes)


def _absent_entries(view: View) -> tuple[list[Entry], tuple[str, ...]]:
    """The base parameters that the files of the base lack, under the names that PEFT loads them by,
    and notes.

    They are random at each load, such as the head of a classifier on a causal base.
    """
    base = dict(base_sources(view))
    model, configs = _model_below(view.module), view.module.peft_config.values()
    identities = [(config.base_model_name_or_path, config.revision) for config in configs]
    identities.append((getattr(model, "name_or_path", None), None))
    absent = absent_parameters(model, base, [identity for identity in identities if identity[0]])
    if absent and absent >= {name for name, source in base.items() if source.is_parameter}:
        note = (
            f"{type(model).__name__}: none of its parameters is in the files of the base that the "
            "adapter names; load the adapter with base= and this model"
        )
        return [], (note,)
    prefix = "" if is_peft_model(view.module) else PREFIX
    entries = []
    for name in sorted(absent):
        steps = [step for step in base[name].name.split(".") if step != "original_module"]
        entries.append(unchanged_entry(prefix + ".".join(steps), base[name]))
    return entries, ()


def missing_trainable(view: View, parts: Iterable[Part]) -> list[str]:
    """Trainable tensors that none of `parts` stores."""
    stored = {source.key for p in parts for entry in p.entries for source in entry.sources}
    return [
        name
        for name, source in view.sources.items()
        if source.trainable and source.key not in stored
    ]


def check_complete(view: View, parts: list[Part]) -> None:
    """Raise IncompleteError naming every trainable tensor of the model that no adapter part
    stores.
    """
    missing = missing_trainable(view, parts)
    if missing:
        raise IncompleteError(
            f"{listing(missing, ', ')}: trained, but in no adapter's selection; save with "
            "adapter_only=False, or freeze them"
        )
