"""The full state dict of a model under any engine."""

from collections.abc import Sequence

from torch import Tensor, nn

from ft_ckpt.ranks import current_ranks
from ft_ckpt.ranks.moving import gather_tensors
from ft_ckpt.ranks.wrappers import ModelTensors


def full_state_dict(model: nn.Module, names: Sequence[str] | None = None) -> dict[str, Tensor]:
    """Copies by canonical names, on the host of rank 0; `{}` on other ranks.

    Collective. `names` limits it.
    """
    found = ModelTensors(model).sources()
    chosen = [found[name] for name in (names if names is not None else found)]
    return gather_tensors(chosen, current_ranks())
