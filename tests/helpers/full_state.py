"""The full state dict of a model under any engine."""

from collections.abc import Sequence

from torch import Tensor, nn

from ft_ckpt.ranks import current_ranks
from ft_ckpt.ranks.moving import gather_tensors
from ft_ckpt.ranks.wrappers import ModelTensors


def full_state_dict(model: nn.Module, names: Sequence[str] | None = None) -> dict[str, Tensor]:
    """Copy the tensors to the host of rank 0, by canonical names; `{}` on other ranks.

    Collective. `names` chooses some of them.
    """
    sources = ModelTensors(model).sources()
    if names is None:
        names = list(sources)
    return gather_tensors([sources[name] for name in names], current_ranks())
