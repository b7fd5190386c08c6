"""Refuses adapters that cannot be merged, and says why.

Reasons are the method of an adapter, a layer that PEFT cannot merge, and tensors of an adapter that
no layer uses.
"""

import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper

from ft_ckpt.errors import SelectionError, listing
from ft_ckpt.extensions.tools.merging.adapted_layers import AdaptedLayer, merge_layer, nested_layers
from ft_ckpt.model.sidecars import is_quantised
from ft_ckpt.model.tensors import View

_PEFT_FOLDER = str(Path(peft.__file__).parent)


def refuse_quantised(base: Any) -> None:
    """Raise SelectionError for a base whose weights are quantised."""
    if getattr(base, "config", None) is not None and is_quantised(base, base.config):
        raise SelectionError(
            f"{type(base).__name__}: its weights are quantised, and merging would quantise them "
            "once more; save the adapter with adapter_only=True, then merge it into the model that "
            "was quantised: ft_ckpt.merge(adapter, out, base=...)"
        )


def refuse_unmergeable(view: View, names: Sequence[str], layers: Sequence[AdaptedLayer]) -> None:
    """Raise SelectionError naming all reasons why the adapters `names` cannot be merged."""
    problems = []
    for name in names:
        reason = _why_not_adapter(view.module.peft_config[name])
        if reason:
            problems.append(f"adapter {name}: {reason}")

    for layer in layers:
        reason = _why_not_layer(layer)
        if reason:
            problems.append(f"{layer.path}: {reason}")

    problems = problems or _unused_tensors(view, names, layers)
    if problems:
        raise SelectionError(
            f"{listing(problems)}: cannot be merged; keep it an adapter (adapter_only=True), which "
            "ft_ckpt.load_model and PEFT put onto the base"
        )


def _why_not_adapter(config: Any) -> str | None:
    """Return why adapters with this PEFT config cannot be merged, or None."""
    method = str(getattr(config.peft_type, "value", config.peft_type))
    if config.is_prompt_learning or config.is_adaption_prompt:
        return f"{method} acts on inputs, not on weights"
    if getattr(config, "layer_replication", None):
        return "layer_replication has one weight stand for several layers"
    return None


def _why_not_layer(layer: AdaptedLayer) -> str | None:
    """Return why the layer cannot be merged, or None."""
    for tuner in nested_layers(layer.module):
        if tuner.disable_adapters:
            return "its adapters are switched off (call enable_adapter_layers())"
        if isinstance(tuner, BaseTunerLayer) and type(tuner).merge is BaseTunerLayer.merge:
            method = type(tuner).__module__.split(".")[-2]
            return f"PEFT has no merge for {method} ({type(tuner).__name__})"
    has_trained_copies = isinstance(layer.module, AuxiliaryTrainingWrapper)
    if has_trained_copies and len(layer.adapters) > 1 and layer.weights is None:
        return (
            f"trained by several adapters ({', '.join(layer.adapters)}), of which only one can "
            "replace it; give each a weight"
        )
    return _problem_of_trial_merge(layer)


def _problem_of_trial_merge(layer: AdaptedLayer) -> str | None:
    """Merge the layer on the meta device, which computes only shapes.

    Returns the refusal of PEFT, or the wrong shapes of the result, or None.
    """
    try:
        outputs = merge_layer(layer, {})
    except Exception as error:  # noqa: BLE001 - a refusal by PEFT, or an error of torch on the meta device
        last_frame = traceback.extract_tb(error.__traceback__)[-1]
        is_raised = str(last_frame.line).startswith("raise")
        is_refusal = is_raised and last_frame.filename.startswith(_PEFT_FOLDER)
        return f"{type(error).__name__}: {error}" if is_refusal else None

    problems = []
    for name, source in layer.base.items():
        shape = None
        if name in outputs:
            shape = tuple(outputs[name].shape)
        if shape != source.shape:
            problems.append(f"{name} is {shape}, not {source.shape}")

    return f"once merged, {listing(problems, ', ')}" if problems else None


def _unused_tensors(view: View, names: Sequence[str], layers: Sequence[AdaptedLayer]) -> list[str]:
    """Return a problem for each tensor of the adapters `names` that no layer uses."""
    used_keys = {source.key for _, source in view.base_sources()}
    for layer in layers:
        used_keys.update(source.key for source in layer.sources)
        used_keys.update(source.key for source in layer.base.values())
    other_adapters = set(view.module.peft_config) - set(names)
    unused = []
    for name, source in view.sources.items():
        if source.key not in used_keys and other_adapters.isdisjoint(name.split(".")):
            unused.append(f"{name}: used by no layer")
    return unused
