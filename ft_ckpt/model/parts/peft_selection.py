"""Selects the tensors of an adapter with PEFT's own code, under the names that PEFT stores.

Each method of PEFT selects its tensors in another way, so PEFT is called. It gets placeholders
instead of tensors, so that sharded tensors are not gathered for it. The placeholders have raw
names: names in the module tree, with the steps that wrappers such as FSDP add.

Some methods compute tensors when they are saved, for example pruned ranks. These tensors are
computed during the save, from all tensors of the adapter.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ft_ckpt.errors import SelectionError, shown
from ft_ckpt.model.tensors import (
    PREFIX,
    Entry,
    Group,
    View,
    is_peft_model,
    layers_with_base,
    root_steps,
    unchanged_entry,
)
from ft_ckpt.ranks.sharding import Source
from ft_ckpt.ranks.wrappers import shallow_copy, wrapper_steps


def adapter_entries(view: View, adapter: str) -> list[Entry]:
    """Return the entries of all tensors that PEFT stores for the adapter.

    Tensors that PEFT computes when it saves, such as pruned ranks and top-k indices, have a group
    that computes them from all tensors of the adapter.
    """
    if view.module.peft_config[adapter].is_prompt_learning:
        return _prompt_entries(view, adapter)
    sources = _sources_for(view, adapter)
    placeholders = {}
    source_of: dict[int, Source] = {}  # the source of each placeholder, by its id
    for source in sources:
        empty = torch.zeros((), dtype=source.dtype, device="cpu").expand(source.shape)
        placeholders[source.raw_name] = empty
        source_of[id(empty)] = source

    selected = _select_by_peft(view.module, placeholders, adapter)
    computed = [name for name, tensor in selected.items() if id(tensor) not in source_of]
    names = _StoredNames(view)
    group = None
    if computed:
        base_ids = {id(source) for _, source in view.base_sources()}
        inputs = [source for source in sources if id(source) not in base_ids]
        selection = _ComputedSelection(view.module, adapter, inputs, frozenset(computed), names)
        group = Group(tuple(inputs), selection.convert)

    entries = []
    for name, tensor in selected.items():
        shape, dtype = tuple(tensor.shape), tensor.dtype
        entry = Entry(names.of(name), shape, dtype, dtype, source_of.get(id(tensor)))
        if entry.source is None:
            entry = entry._replace(group=group)
        entries.append(entry)

    return entries


class _StoredNames:
    """Makes the names in an adapter's file from the names that PEFT returns for raw names."""

    def __init__(self, view: View) -> None:
        names = [(name, source.raw_name) for name, source in view.sources.items()]
        self._wrapper_steps = wrapper_steps(names)
        self._prefix = "" if is_peft_model(view.module) else PREFIX

    def of(self, name: str) -> str:
        """Return the name in the file, which has no steps of wrappers."""
        steps = [step for step in name.split(".") if step not in self._wrapper_steps]
        return self._prefix + ".".join(steps)


@dataclass(frozen=True, eq=False)
class _ComputedSelection:
    """Computes the tensors that PEFT computes when it saves an adapter.

    `inputs` are the tensors of the adapter. `computed_names` are the names that PEFT returns for
    the computed tensors.
    """

    module: nn.Module
    adapter: str
    inputs: Sequence[Source]
    computed_names: frozenset[str]
    names: _StoredNames

    def convert(self, full: dict[str, Tensor]) -> dict[str, Tensor]:
        """Compute the tensors, by stored name. `full` has the unsharded inputs, by name."""
        tensors = {source.raw_name: full[source.name] for source in self.inputs}
        selected = _select_by_peft(self.module, tensors, self.adapter)
        stored = {}
        for name, tensor in selected.items():
            if name in self.computed_names:
                stored[self.names.of(name)] = tensor.contiguous()
        return stored


def _sources_for(view: View, adapter: str) -> list[Source]:
    """Return the tensors of the model without those of its other adapters.

    PEFT looks for the name of an adapter at any step of a path. For an adapter called "0" it would
    select all of layer 0, with the other adapters there.
    """
    left_out = set(view.module.peft_config) - {adapter}
    if not left_out:
        return list(view.sources.values())
    base_steps_at = layers_with_base(view.module)
    root = root_steps(view.module)
    sources = []
    for name, source in view.sources.items():
        if _adapter_of(name.split("."), base_steps_at, root) not in left_out:
            sources.append(source)
    return sources


def _adapter_of(
    steps: list[str], base_steps_at: Mapping[str, tuple[str, ...]], root: list[str]
) -> str | None:
    """Return the name of the adapter that a tensor belongs to, or None for a tensor of the base.

    `steps` is the path of the tensor. In a PEFT layer, the name of the adapter comes after a child
    of the layer: "q_proj.lora_A.NAME.weight". Outside the base it is the last step.
    """
    path = ""
    for index, step in enumerate(steps):
        if path in base_steps_at and step not in base_steps_at[path]:
            return steps[index + 1] if index + 1 < len(steps) else None
        path = f"{path}.{step}" if path else step
    return steps[-1] if steps[: len(root)] != root else None


def _select_by_peft(
    module: Any, state_dict: Mapping[str, Tensor], adapter: str
) -> dict[str, Tensor]:
    from peft import get_peft_model_state_dict

    # The default of `save_embedding_layers` would ask the Hub for the vocabulary of the base. The
    # module `adapters` adds resized embeddings instead.
    try:
        selected: dict[str, Tensor] = get_peft_model_state_dict(
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

    return selected


def _with_one_adapter(module: Any, adapter: str) -> Any:
    """Return a shallow copy of the module that has only this adapter.

    The config of the adapter is copied, too, because PEFT modifies it.
    """
    copied = shallow_copy(module)
    owner = copied  # the module with the attribute `peft_config`
    tuner = module._modules.get("base_model")
    if tuner is not None and getattr(tuner, "peft_config", None):
        owner = shallow_copy(tuner)
        vars(copied)["_modules"] = {**module._modules, "base_model": owner}
    owner.peft_config = {adapter: copy.copy(module.peft_config[adapter])}
    return copied


def _prompt_entries(view: View, adapter: str) -> list[Entry]:
    """Make the entries of an adapter of a prompt method.

    These are the output of its prompt encoder, and the copies of modules that were trained
    (`modules_to_save`).
    """
    prefix = f"prompt_encoder.{adapter}."
    inputs: list[Source] = []
    trained: dict[str, Source] = {}
    for name, source in view.sources.items():
        if name.startswith(prefix):
            inputs.append(source)
        if "modules_to_save" in name.split("."):
            trained[name] = source

    encoder = _PromptEncoder(view.module, adapter, inputs, list(trained.values()))
    group = Group(tuple(inputs), encoder.convert)
    zeros = {}
    for source in inputs:
        zeros[source.name] = torch.zeros(source.shape, dtype=source.dtype, device="cpu")
    entries = []
    for name, tensor in encoder.convert(zeros).items():
        entries.append(Entry(name, tuple(tensor.shape), tensor.dtype, tensor.dtype, group=group))
    saved_steps = f".modules_to_save.{adapter}."
    for name, source in trained.items():
        if saved_steps in name:
            entries.append(unchanged_entry(name.replace(saved_steps, "."), source))

    return entries


@dataclass(frozen=True, eq=False)
class _PromptEncoder:
    """Computes the prompts of a prompt method.

    The encoder is rebuilt from unsharded tensors, because the live one can be sharded.

    Attributes:
        module: the PeftModel.
        adapter: name of the adapter.
        inputs: tensors of the encoder.
        trained: tensors of `modules_to_save`. PEFT expects them, but their values are not used.
    """

    module: Any
    adapter: str
    inputs: Sequence[Source]
    trained: Sequence[Source]

    @torch.no_grad()
    def convert(self, full: dict[str, Tensor]) -> dict[str, Tensor]:
        """Compute the prompts that PEFT stores. `full` has the unsharded inputs, by name."""
        prefix = f"prompt_encoder.{self.adapter}."
        tensors = {}
        for source in self.inputs:
            tensors[source.name.partition(prefix)[2]] = full[source.name]
        encoder = _rebuild_module(self.module.prompt_encoder[self.adapter], tensors)
        model = shallow_copy(self.module)  # only this copy gets the rebuilt encoder
        encoders = nn.ModuleDict({self.adapter: encoder})
        vars(model)["_modules"] = {**model._modules, "prompt_encoder": encoders}
        placeholders = {source.raw_name: torch.zeros(1, device="cpu") for source in self.trained}
        selected = _select_by_peft(model, placeholders, self.adapter)
        prompts = {}
        for name, tensor in selected.items():
            if tensor.numel() != 0 and "modules_to_save" not in name:
                prompts[name] = tensor.detach().contiguous()

        return prompts


def _rebuild_module(module: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Copy `module`, with `tensors` as its parameters and buffers."""
    # Parameters are not copied, because `tensors` replace them.
    empty = {}
    for parameter in module.parameters():
        empty[id(parameter)] = nn.Parameter(torch.empty(0, device="cpu"), requires_grad=False)
    copied = copy.deepcopy(module, memo=dict(empty))
    for name, tensor in tensors.items():
        path, _, last_name = name.rpartition(".")
        owner = copied.get_submodule(path)
        vars(owner).pop(last_name, None)
        if last_name in owner._buffers:
            owner._buffers[last_name] = tensor
        else:
            owner._parameters[last_name] = nn.Parameter(tensor, requires_grad=False)
    return copied
