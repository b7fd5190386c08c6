"""Marks the tensors of a base model that a merge of adapters changes.

Each tensor of the live model is a `Source`, whose key identifies the tensor. Sources with the same
key are tied: they are one tensor under several names. A tensor that a merge changes gets a new key
here. The rest of the plan then knows which tensors must be computed, and which are still tied.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NamedTuple

from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.utils.other import AuxiliaryTrainingWrapper

from ft_ckpt.extensions.tools.merging.adapted_layers import AdaptedLayer
from ft_ckpt.model.sidecars import nested_configs
from ft_ckpt.model.tensors import View
from ft_ckpt.ranks.sharding import Source
from ft_ckpt.ranks.wrappers import shallow_copy

# Keys of computed tensors. Keys of live tensors are object ids or negative, so they never collide.
_new_keys = count(1 << 40)


class LayerOutput(NamedTuple):
    """One tensor that the merge of a layer computes.

    Attributes:
        layer: The layer.
        name: The name of the tensor in the layer, such as "weight".
    """

    layer: AdaptedLayer
    name: str


@dataclass(frozen=True, eq=False)
class RekeyedBase:
    """The base model, in which each tensor that the merge changes has a new key.

    A tensor that was tied to a changed tensor has a new key, too, even if it does not change.

    Attributes:
        view: The base model with the new keys.
        outputs: The changed tensors, by new key.
        originals: The live source of each unchanged tensor with a new key, by that key.
        untied: For each tied tensor that the merge makes into several tensors, all of its names.
    """

    view: View
    outputs: Mapping[int, LayerOutput]
    originals: Mapping[int, Source]
    untied: tuple[tuple[str, ...], ...]

    def has_new_key(self, source: Source) -> bool:
        return source.key in self.outputs or source.key in self.originals

    def live_source(self, source: Source) -> Source:
        """Return the source in the live model for an unchanged source of `view`."""
        return self.originals.get(source.key, source)


def give_new_keys(base: View, layers: Sequence[AdaptedLayer]) -> RekeyedBase:
    """Give new keys to the tensors that a merge of `layers` changes, and to those tied to them.

    For example, "embed.weight" and "head.weight" are tied with key 7, and an adapter changes only
    "head". The merge unties them:

        name             key before   key after   found in
        "embed.weight"   7            101         originals: the live tensor with key 7
        "head.weight"    7            102         outputs: "weight" of the merged layer "head"
    """
    outputs_by_name = {}
    for layer in layers:
        for name in layer.base:
            outputs_by_name[f"{layer.base_path}.{name}"] = LayerOutput(layer, name)

    names_by_key: dict[int, list[str]] = {}
    for name, source in base.sources.items():
        names_by_key.setdefault(source.key, []).append(name)

    sources = dict(base.sources)
    outputs: dict[int, LayerOutput] = {}
    originals: dict[int, Source] = {}
    untied = []
    for tied_names in names_by_key.values():
        if outputs_by_name.keys().isdisjoint(tied_names):
            continue

        identities = {_tensor_identity(outputs_by_name.get(name)) for name in tied_names}
        if len(identities) == 1:
            new_keys = dict.fromkeys(tied_names, next(_new_keys))
        else:
            new_keys = {name: next(_new_keys) for name in tied_names}
            untied.append(tuple(tied_names))

        for name, key in new_keys.items():
            if name in outputs_by_name:
                outputs[key] = outputs_by_name[name]
            else:
                originals[key] = base.sources[name]
            sources[name] = replace(base.sources[name], key=key)

    module = _without_ties(base.module) if untied else base.module
    return RekeyedBase(View(module, sources, base.extra), outputs, originals, tuple(untied))


def _tensor_identity(output: LayerOutput | None) -> Any:
    """Return a value that two tied names share if they are still one tensor after the merge.

    `output` is None for a name that the merge does not change. All such names share the value None.
    Two layers that train a tied tensor through the same `modules_to_save` copy or the same trained
    tokens share a value, too. Two LoRA layers do not.
    """
    if output is None:
        return None
    layer, name = output
    if not isinstance(layer.module, (AuxiliaryTrainingWrapper, TrainableTokensLayer)):
        return id(layer), name
    source_keys = frozenset(source.key for source in layer.sources)
    return type(layer.module), name, source_keys, layer.adapters, layer.weights


def _without_ties(module: Any) -> Any:
    """Return the model with a config that ties no embeddings; the live model keeps its config."""
    untied = shallow_copy(module)
    untied.config = copy.deepcopy(module.config)
    for config in (untied.config, *nested_configs(untied.config)):
        if getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = False
    return untied
