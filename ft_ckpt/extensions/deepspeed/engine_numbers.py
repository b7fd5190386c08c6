"""Captures and restores the numbers that DeepSpeed keeps: its counters, and its loss scaler."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ft_ckpt.formats.trees import decode_value, encode_value

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass(frozen=True, eq=False)
class EngineCounters:
    """Captures the counters of a DeepSpeed engine: steps, skipped steps, samples, micro-batches.

    Samples are those of all ranks.
    """

    engine: Any

    def state_dict(self) -> dict[str, int]:
        counts = {name: int(getattr(self.engine, name)) for name in _COUNTERS}
        return {**counts, "accumulation": int(self.engine.gradient_accumulation_steps())}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        for name in _COUNTERS:
            setattr(self.engine, name, state[name])
        # Micro-batches are converted, because their number per step may have changed.
        steps, rest = divmod(state["micro_steps"], state["accumulation"])
        self.engine.micro_steps = steps * self.engine.gradient_accumulation_steps() + rest


def scaler_numbers(optimizer: Any) -> dict[str, Any]:
    """Return the variables of the dynamic loss scaler of DeepSpeed or torch, or {} without one."""
    torch_scaler = optimizer.torch_autocast_gradscaler
    if torch_scaler is not None:
        return {key: encode_value(value) for key, value in torch_scaler.state_dict().items()}
    scaler = getattr(optimizer, "loss_scaler", None)
    if not getattr(scaler, "dynamic", False):
        return {}
    return {key: encode_value(getattr(scaler, key)) for key in _SCALER}


def restore_scaler(optimizer: Any, stored: Mapping[str, Any]) -> None:
    """Restore the `scaler_numbers` of a loss scaler. Those of another kind are ignored."""
    values = {key: decode_value(value) for key, value in stored.items()}
    if set(values) != set(scaler_numbers(optimizer)):
        return  # the precision or the scaler has changed
    if optimizer.torch_autocast_gradscaler is not None:
        optimizer.torch_autocast_gradscaler.load_state_dict(values)
        return
    for key, value in values.items():
        setattr(optimizer.loss_scaler, key, value)
