"""Plain modules described as JSON and rebuilt without constructors or imports."""

import json
import sys
import types
from enum import IntEnum

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule

from ft_ckpt.distributed.wrappers import user_class
from ft_ckpt.errors import LoadError
from ft_ckpt.model.plain_module import build_module, describe_module, global_shape, module_text


class ValueHead(nn.Module):
    """The shape of TRL's value head."""

    def __init__(self, hidden: int, dropout: float) -> None:
        super().__init__()
        if hidden <= 0:
            raise AssertionError("the constructor ran")
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.summary = nn.Linear(hidden, 1)
        self.flatten = nn.Flatten()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.summary(self.dropout(hidden).to(self.summary.weight.dtype))


class Tied(nn.Module):
    """Tied parameters, a shared child, buffers of both kinds, an absent and a 0-d parameter, odd attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.again = self.embed
        self.scale = nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.register_parameter("absent", None)
        self.register_buffer("count", torch.tensor(3, dtype=torch.int64))
        self.register_buffer("mask", torch.tril(torch.ones(3, 3, dtype=torch.bool)), persistent=False)
        self.register_buffer("angles", torch.arange(4, dtype=torch.bfloat16) / 3, persistent=False)
        self.register_buffer("later", None)
        self.absent_child = None
        self.add_module("missing", None)
        self.type = "reward"
        self._private = (1, [2.5, float("inf")], {"a": (None, True), 3: torch.Size([1, 2])}, torch.float16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.again(tokens)) * self.scale + self.angles[0]


def rebuild(module: nn.Module, **options: object) -> nn.Module:
    """Through JSON text, with the values of the original, as a reader would."""
    rebuilt = build_module(json.loads(json.dumps(describe_module(module))), **options)
    assert [name for name, _ in rebuilt.named_modules()] == [name for name, _ in module.named_modules()]
    for new, old in zip(rebuilt.modules(), module.modules(), strict=True):
        assert list(new._parameters) == list(old._parameters)
        assert list(new._buffers) == list(old._buffers)
        new._parameters.update(old._parameters)
        new._buffers.update({k: b for k, b in old._buffers.items() if k not in old._non_persistent_buffers_set})
    return rebuilt.train(module.training)


def facts(module: nn.Module) -> list[tuple[object, ...]]:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return [(name, tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in tensors]


MODULES = {
    "linear": lambda: (nn.Linear(4, 3), torch.randn(2, 4)),
    "no_bias": lambda: (nn.Linear(4, 3, bias=False), torch.randn(2, 4)),
    "sequential": lambda: (
        nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 1)).eval(),
        torch.tensor([[1, 2]]),
    ),
    "value_head": lambda: (ValueHead(4, 0.0), torch.randn(2, 3, 4)),
    "attention": lambda: (nn.TransformerEncoderLayer(4, 2, 8, activation=nn.GELU()).eval(), torch.randn(3, 1, 4)),
    "tied": lambda: (Tied(), torch.tensor([[0, 4]])),
    "batch_norm": lambda: (nn.BatchNorm1d(4).eval(), torch.randn(2, 4)),
}


@pytest.mark.filterwarnings("ignore:module.json. activation_relu_or_gelu")
@pytest.mark.parametrize("name", MODULES)
def test_round_trip_computes_the_same(name: str) -> None:
    """A value head comes back as the module it was."""
    module, example = MODULES[name]()
    rebuilt = rebuild(module)
    assert type(rebuilt) is type(module)
    assert facts(build_module(describe_module(module))) == facts(module)
    assert rebuilt.extra_repr() == module.extra_repr()
    assert torch.equal(rebuilt(example), module(example))


@pytest.mark.parametrize(
    "container", [nn.ModuleDict({"b": nn.Linear(2, 2), "a": nn.ReLU()}), nn.ModuleList([nn.Tanh()])]
)
def test_containers_keep_their_order(container: nn.Module) -> None:
    assert [(n, type(m)) for n, m in rebuild(container).named_modules()] == [
        (n, type(m)) for n, m in container.named_modules()
    ]


def test_parameter_containers() -> None:
    listed = rebuild(nn.ParameterList([nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(3))]))
    assert [p.tolist() for p in listed] == [[1, 1], [0, 0, 0]]
    named = rebuild(nn.ParameterDict({"w": torch.ones(2)}))
    assert named["w"].tolist() == [1, 1]


def test_ties_attributes_and_buffers_come_back() -> None:
    rebuilt = rebuild(Tied())
    assert isinstance(rebuilt, Tied)
    assert rebuilt.again is rebuilt.embed
    described = build_module(describe_module(Tied()))
    assert described.head.weight is described.embed.weight
    assert rebuilt._private == Tied()._private
    assert type(rebuilt._private[2][3]) is torch.Size
    assert rebuilt.type == "reward"
    assert rebuilt.absent is None
    assert rebuilt.missing is None
    assert set(rebuilt.state_dict()) == set(Tied().state_dict())
    assert torch.equal(rebuilt.mask, Tied().mask)
    assert torch.equal(rebuilt.angles, Tied().angles)


def test_parameters_are_on_meta() -> None:
    assert {p.device.type for p in build_module(describe_module(ValueHead(4, 0.1))).parameters()} == {"meta"}


def test_dropout_rate_is_kept() -> None:
    assert rebuild(ValueHead(4, 0.25)).dropout.p == 0.25


def test_wrappers_are_peeled_at_any_depth() -> None:
    module = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)), torch.compile(checkpoint_wrapper(ValueHead(4, 0.1))))
    plain = nn.Sequential(nn.Linear(2, 2), ValueHead(4, 0.1))
    module[1]._compile_kwargs = {}  # as Lightning leaves it on what is compiled, once it has been imported
    assert describe_module(torch.compile(module)) == describe_module(plain)
    assert describe_module(nn.DataParallel(plain)) == describe_module(plain)


def test_fsdp2_class_is_recorded_as_written() -> None:
    fsdp = type("FSDPValueHead", (FSDPModule, ValueHead), {})
    module = ValueHead(4, 0.1)
    module.__class__ = fsdp
    assert describe_module(module)["class"] == f"{__name__}:ValueHead"
    own = type("FSDPValueHead", (ValueHead,), {})  # somebody's own class, named so
    assert user_class(own) is own


def test_shapes_of_sharded_parameters() -> None:
    linear = nn.Linear(4, 3)
    linear.weight.ds_shape = torch.Size([4, 4])
    linear.weight.data = torch.empty(0)
    assert global_shape(linear.weight) == (4, 4)
    assert describe_module(linear)["parameters"][0]["shape"] == [4, 4]
    given = describe_module(nn.Sequential(linear), shapes={"0.weight": (8, 4)})
    assert given["children"][0][1]["parameters"][0]["shape"] == [8, 4]


def test_flat_views_become_parameters_with_given_shapes() -> None:
    """FSDP1 without original parameters leaves tensors where the parameters were."""
    linear = nn.Linear(4, 3)
    view = linear.weight.detach()
    del linear._parameters["weight"]
    linear.weight = view
    assert describe_module(linear)["opaque"] == ["weight"]
    described = describe_module(linear, shapes={"weight": (3, 4), "bias": (3,)})
    assert described["opaque"] == []
    assert dict(build_module(described).named_parameters())["weight"].shape == (3, 4)


def test_engine_marks_are_left_out() -> None:
    linear = nn.Linear(2, 2)
    linear.ds_id, linear._is_fsdp_managed_module, linear.forward = 7, True, print
    assert describe_module(linear) == describe_module(nn.Linear(2, 2))


def test_what_cannot_be_recorded_is_named() -> None:
    class Colour(IntEnum):
        RED = 1

    head = ValueHead(4, 0.1)
    loop: list[object] = []
    loop.append(loop)
    head.loop, head.function, head.summary.colour = loop, print, Colour.RED
    assert describe_module(head)["opaque"] == ["loop", "function"]
    with pytest.warns(UserWarning, match=r"loop, function, summary\.colour"):
        build_module(describe_module(head))


def test_hooks_are_named() -> None:
    """They are code, and what they do to values would be missing without a word."""
    doubled = nn.Sequential(nn.Linear(2, 2))
    doubled[0].register_forward_hook(lambda module, args, output: output * 2)
    with pytest.warns(UserWarning, match=r"0\._forward_hooks"):
        build_module(describe_module(doubled))
    with pytest.warns(UserWarning, match=r"0\.weight, 0\._forward_pre_hooks"):
        build_module(describe_module(nn.Sequential(nn.utils.weight_norm(nn.Linear(2, 2)))))


def test_large_buffer_is_named_not_stored() -> None:
    module = nn.Module()
    module.register_buffer("table", torch.zeros(5 << 20), persistent=False)
    assert len(json.dumps(describe_module(module))) < 1000
    with pytest.warns(UserWarning, match="table"):
        assert build_module(describe_module(module)).table.is_meta


def test_description_changes_nothing(tmp_path) -> None:
    module = Tied()
    before = {name: dict(vars(child)) for name, child in module.named_modules()}
    text = module_text(module)
    assert {name: dict(vars(child)) for name, child in module.named_modules()} == before
    assert json.loads(text) == describe_module(module)


def test_classes_may_be_given() -> None:
    description = describe_module(ValueHead(4, 0.1))
    description["class"] = "gone.away:ValueHead"
    with pytest.raises(LoadError, match=r"gone\.away is not imported.*import the module first"):
        build_module(description)
    assert type(build_module(description, classes={"ValueHead": ValueHead})) is ValueHead
    assert type(build_module(description, classes={"gone.away:ValueHead": ValueHead})) is ValueHead


def test_local_classes_are_refused_with_advice() -> None:
    class Local(nn.Linear):
        pass

    with pytest.raises(LoadError, match="pass classes="):
        build_module(describe_module(Local(1, 1)))


HOSTILE = ["os:system", "subprocess:Popen", "builtins:exec", "antigravity:Linear", "torch.nn:Linear.forward", "", ":"]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_classes_are_refused(name: str) -> None:
    description = {**describe_module(nn.Linear(1, 1)), "class": name}
    before = set(sys.modules)
    with pytest.raises(LoadError):
        build_module(description)
    assert set(sys.modules) == before


def test_no_code_of_a_module_runs_on_lookup(monkeypatch) -> None:
    class Lazy(types.ModuleType):
        def __getattr__(self, name: str) -> object:
            raise AssertionError(f"looked up {name}, which would import")

    monkeypatch.setitem(sys.modules, "lazy_package", Lazy("lazy_package"))
    with pytest.raises(LoadError, match="no such class"):
        build_module({**describe_module(nn.Linear(1, 1)), "class": "lazy_package:Model"})


def test_setters_of_the_class_do_not_run() -> None:
    class Trap(nn.Linear):
        @property
        def trap(self) -> int:
            return 1

        @trap.setter
        def trap(self, value: int) -> None:
            raise AssertionError("setter ran")

    description = describe_module(Trap(1, 1))
    description["attributes"] |= {"trap": 2}
    built = build_module(description, classes={description["class"]: Trap})
    assert type(built) is Trap
    description["attributes"] |= {"_modules": 3, "__class__": 4}
    with pytest.raises(LoadError, match="_modules, __class__"):
        build_module(description, classes={description["class"]: Trap})


BREAKS = {
    "format": lambda d: d.update(format=99),
    "no_format": lambda d: d.pop("format"),
    "dtype": lambda d: d["parameters"][0].update(dtype="load"),
    "shape": lambda d: d["parameters"][0].update(shape=[-1]),
    "same_as": lambda d: d["parameters"][0].update(same_as="nowhere"),
    "tag": lambda d: d["attributes"].update(x={"eval": "1"}),
    "children": lambda d: d.update(children=[["a"]]),
    "no_parameters": lambda d: d.pop("parameters"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_malformed_descriptions_are_load_errors(name: str) -> None:
    description = describe_module(nn.Linear(2, 2))
    BREAKS[name](description)
    with pytest.raises(LoadError, match=r"module\.json"):
        build_module(description)


@pytest.mark.parametrize(
    "name", ["forward", "state_dict", "_parameters", "_forward_hooks", "__class__", "training_step"]
)
def test_a_description_takes_no_place_of_a_method(name):
    """What a class does is its own to say: an attribute called like a method, or like torch's own, is refused."""

    class Own(nn.Linear):
        def training_step(self):
            return 1

    tree = describe_module(Own(2, 2))
    tree["attributes"][name] = "taken"
    with pytest.raises(LoadError, match=f"{name}: names of methods"):
        build_module(tree, {"Own": Own, tree["class"]: Own})


def test_an_attribute_in_the_place_of_a_method_is_not_recorded():
    class Own(nn.Linear):
        def mode(self):
            return 1

    module = Own(2, 2)
    module.mode = "set by hand"
    assert describe_module(module)["opaque"] == ["mode"]
