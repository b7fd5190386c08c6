"""The kinds of optimizers that a run may have, by name.

The small ones each have state of another form, of which every value decides on the next weights.
"""

import importlib
import importlib.util
from collections import deque
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Parameters = Iterable[Any]


class Norm(IntEnum):
    LARGEST = 1
    SQUARES = 2


class Small(torch.optim.Optimizer):
    """Steps by `update` of each parameter that has a gradient."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters, {"lr": 0.05, **self.make_settings()})

    def make_settings(self) -> dict[str, Any]:
        return {}

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        raise NotImplementedError

    def advance(self, group: dict[str, Any]) -> None:
        """Change the settings of a group at the beginning of a step: on all ranks alike."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self.advance(group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    change = self.update(parameter, parameter.grad, group)
                    parameter.sub_(change.to(parameter.dtype) * float(group["lr"]))


class Preconditioned(Small):
    """As SOAP and Shampoo: a list with a matrix for each dimension, and None for a vector."""

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[parameter]
        if not state:
            identities = [torch.eye(size) for size in gradient.shape]
            state["steps"] = 0
            state["sides"] = identities if gradient.dim() == 2 else [None]
            state["bases"] = [] if gradient.dim() == 1 else [side.clone() for side in identities]
        state["steps"] += 1
        if gradient.dim() != 2:
            return gradient.div(state["steps"])
        state["sides"][0].lerp_(gradient @ gradient.T, 0.1)
        state["sides"][1].lerp_(gradient.T @ gradient, 0.1)
        state["bases"] = [torch.linalg.eigh(side)[1] for side in state["sides"]]
        left, right = state["bases"]
        turned = left.T @ gradient @ right
        change: Tensor = left @ turned.sign() @ right.T
        return change


class Nested(Small):
    """Dicts, tuples and queues with tensors of several shapes, and plain values."""

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["moments"] = {"fast": torch.zeros_like(parameter), "slow": {"exact": None}}
            state["recent"] = deque(maxlen=2)
            state["flags"] = (torch.tensor([False]), torch.tensor(True), "signed")
            state["numbers"] = {
                "scale": torch.zeros(1, 1, dtype=torch.float64),
                0.5: [1, (2.5, None)],
            }
        moments = state["moments"]
        moments["fast"].lerp_(gradient, 0.3)
        if moments["slow"]["exact"] is None:
            moments["slow"]["exact"] = torch.zeros_like(parameter, dtype=torch.float64)
        moments["slow"]["exact"].mul_(0.9).add_(gradient)
        state["recent"].append(gradient.clone())
        state["flags"][0].logical_not_()
        state["numbers"]["scale"].add_(0.1)
        state["numbers"][0.5][0] += 1
        sign = -0.1 if state["flags"][0] else 1.0
        scale = float(state["numbers"]["scale"]) * state["numbers"][0.5][0]
        slow = moments["slow"]["exact"] * scale
        change: Tensor = moments["fast"] * sign + slow + sum(state["recent"])
        return change


class Settings(Small):
    """Settings of a group that are tensors, numbers of numpy, members of an enum, and lists."""

    def make_settings(self) -> dict[str, Any]:
        return {
            "d": torch.tensor([1e-6]),
            "count": torch.zeros(1, 1, dtype=torch.int64),
            "table": torch.arange(6.0, dtype=torch.bfloat16).view(2, 3),
            "first": torch.tensor([True]),
            "decay": np.float64(0.1) / 3,
            "norm": Norm.SQUARES,
            "sums": [torch.zeros(()), None],
            "total": None,
            "largest": 0.0,
        }

    def advance(self, group: dict[str, Any]) -> None:
        group["d"].add_(0.25 if group["norm"] is Norm.SQUARES else 1.0)
        group["count"].add_(1)
        group["table"].mul_(1.01)
        group["first"].fill_(False)
        group["sums"][0].add_(1)
        if group["total"] is None:
            group["total"] = torch.zeros(1)
        else:
            group["total"].add_(group["d"])
        group["largest"] = torch.zeros(1, dtype=torch.float64).fill_(float(group["largest"]) + 0.5)

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        numbers = [
            *group["d"],
            *group["count"].view(-1),
            group["table"].sum(),
            group["sums"][0],
            *group["total"],
        ]
        factor = sum(map(float, numbers)) + float(group["largest"]) + float(group["decay"])
        return gradient * (factor if not group["first"] else 0.0)


class Turned(Small):
    """A matrix whose elements lie in memory by columns: that decides the last bits of products."""

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[parameter]
        matrix = gradient.reshape(len(gradient), -1)
        if not state:
            state["turned"] = torch.zeros(matrix.shape[::-1]).T
            state["pair"] = [torch.zeros(matrix.shape[::-1]).T]
        state["turned"].add_(matrix)
        state["pair"][0].sub_(matrix)
        product: Tensor = state["turned"] @ (state["pair"][0].T @ matrix)
        return product.view_as(gradient)


class Global(Small):
    """Values and tensors under keys of the state that are no parameters."""

    def advance(self, group: dict[str, Any]) -> None:
        state: dict[Any, Any] = self.state
        calls = state.get("calls", 0) + 1
        mean = state["scale"]["mean"].add_(1.0) if "scale" in state else torch.arange(3.0)
        state["calls"] = calls
        state["scale"] = {"now": calls / 2, "range": [1, calls], "mean": mean}
        state["a", 1] = None

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        state: dict[Any, Any] = self.state
        scale = state["scale"]
        factor: float = scale["now"] + sum(scale["range"]) + float(scale["mean"].sum())
        return gradient * factor


class Around(torch.optim.Optimizer):
    """An optimizer around others: what it steps is not what its `state` says."""

    def __init__(self, parameters: Parameters, inner: Any) -> None:
        self.inner = inner
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step(closure)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.inner.state_dict()
        return state


class AroundOpenly(Around):
    """The same, whose state is that of the one inside."""

    state = property(lambda self: self.inner.state, lambda self, value: None)


class ScheduleFree(torch.optim.SGD):
    """Weights that `train` and `eval` move between the point of training and the average."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.param_groups[0]["train_mode"] = True

    def train(self) -> None:
        self.param_groups[0]["train_mode"] = True

    def eval(self) -> None:
        self.param_groups[0]["train_mode"] = False


def network() -> nn.Module:
    torch.manual_seed(3)
    last = nn.Linear(6, 3, bias=False)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 6), nn.Tanh(), last)


def matrices() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(16, 6, bias=False), nn.Tanh(), nn.Linear(6, 3, bias=False)
    )


def of_torch(name: str, **options: Any) -> Callable[[Parameters], Any]:
    cls = getattr(torch.optim, name)
    return lambda parameters: cls(parameters, **{"lr": 0.01, **options})


def with_tensor_rate(name: str) -> Callable[[Parameters], Any]:
    def make(parameters: Parameters) -> Any:
        rate = torch.tensor([0.01], dtype=torch.float64)
        return getattr(torch.optim, name)(parameters, lr=rate, foreach=False)

    return make


def around_openly(parameters: Parameters) -> Any:
    trained = list(parameters)
    return AroundOpenly(trained, torch.optim.AdamW(trained, lr=0.01))


def in_8_bits(parameters: Parameters) -> Any:
    bitsandbytes: Any = importlib.import_module("bitsandbytes")
    return bitsandbytes.optim.AdamW8bit(parameters, lr=0.01, min_8bit_size=16)


SMALL: dict[str, Callable[[Parameters], Any]] = {
    "preconditioned": Preconditioned,
    "nested": Nested,
    "settings": Settings,
    "turned": Turned,
    "global": Global,
}
_NAMES = "ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax Muon NAdam RAdam RMSprop Rprop SGD"
KINDS: dict[str, Callable[[Parameters], Any]] = {
    **SMALL,
    **{name: of_torch(name) for name in _NAMES.split()},
    "sgd": of_torch("SGD", lr=0.1),
    "momentum": of_torch("SGD", lr=0.1, momentum=0.9, nesterov=True),
    "fused": of_torch("AdamW", fused=True),
    "foreach": of_torch("AdamW", foreach=True, amsgrad=True),
    "centered": of_torch("RMSprop", centered=True, momentum=0.5),
    "tensor_rate_Adam": with_tensor_rate("Adam"),
    "tensor_rate": with_tensor_rate("AdamW"),
    "around": around_openly,
    "schedule_free": ScheduleFree,
}
if importlib.util.find_spec("bitsandbytes") is not None:
    KINDS["in_8_bits"] = in_8_bits
