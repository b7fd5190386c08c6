"""What DeepSpeed counts beside the tensors that it trains: its steps, and the numbers of its loss scaler."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ft_ckpt.model.json_values import decode_value, encode_value

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass(frozen=True, eq=False)
class EngineCounters:
    """What a DeepSpeed engine counts: steps, skipped ones, samples of all ranks, micro-batches and their number."""

    engine: Any

    def state_dict(self) -> dict[str, int]:
        """The counts by name."""
        counts = {name: int(getattr(self.engine, name)) for name in _COUNTERS}
        return {**counts, "accumulation": int(self.engine.gradient_accumulation_steps())}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Let the engine count on from these."""
        for name in _COUNTERS:
            setattr(self.engine, name, state[name])
        # micro-batches are recounted when as many make a step no longer
        steps, rest = divmod(state["micro_steps"], state["accumulation"])
        self.engine.micro_steps = steps * self.engine.gradient_accumulation_steps() + rest


def scaler_numbers(optimizer: Any) -> dict[str, Any]:
    """What changes of its dynamic loss scaler, which there is in half precision only: DeepSpeed's own, or torch's."""
    scaler, torch_scaler = getattr(optimizer, "loss_scaler", None), optimizer.torch_autocast_gradscaler
    if torch_scaler is not None:
        return {key: encode_value(value) for key, value in torch_scaler.state_dict().items()}
    return {key: encode_value(getattr(scaler, key)) for key in _SCALER} if getattr(scaler, "dynamic", False) else {}


def restore_scaler(optimizer: Any, stored: Mapping[str, Any]) -> None:
    """Let the loss scaler go on from the numbers that `scaler_numbers` gave, if they are of one of its kind."""
    values = {key: decode_value(value) for key, value in stored.items()}
    if set(values) == set(scaler_numbers(optimizer)):  # else float16 has come or gone, or the other scaler
        if optimizer.torch_autocast_gradscaler is not None:
            optimizer.torch_autocast_gradscaler.load_state_dict(values)
            return
        for key, value in values.items():
            setattr(optimizer.loss_scaler, key, value)
