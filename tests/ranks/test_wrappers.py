"""A new kind of wrapper is a class and a line in the list; a walk gives the same names and keys
under all of them.
"""

import pytest
import torch
from full_state import full_state_dict
from torch import Tensor, nn

import ft_ckpt
from ft_ckpt import CheckpointSaver
from ft_ckpt.errors import SelectionError
from ft_ckpt.ranks import current_ranks
from ft_ckpt.ranks.moving import gather_tensors
from ft_ckpt.ranks.sharding import ReplicatedSharding, TensorKind, TensorLayout
from ft_ckpt.ranks.wrappers import ModelTensors, Wrapper, tensor_kinds, wrappers
from ft_ckpt.ranks.wrappers.module_state import added_state


class Crate(nn.Module):
    """Keeps the parameters of a module in one flat buffer, as an engine might."""

    def __init__(self, content: nn.Module) -> None:
        super().__init__()
        self.content, self.places = content, {}
        buffer = torch.cat([parameter.detach().reshape(-1) for parameter in content.parameters()])
        first = 0
        for module in content.modules():
            for name, parameter in list(module._parameters.items()):
                self.places[id(module), name] = Place(buffer, first, parameter)
                first += parameter.numel()
                del module._parameters[name]


class Place:
    def __init__(self, buffer: Tensor, first: int, parameter: Tensor) -> None:
        self.buffer, self.first, self.shape, self.dtype = (
            buffer,
            first,
            tuple(parameter.shape),
            parameter.dtype,
        )


class CrateWrapper(Wrapper):
    child_key = "content"

    def wraps(self, module):
        return isinstance(module, Crate)

    def tensors_of_modules(self, modules):
        return {
            at: place
            for one in modules
            if isinstance(one, Crate)
            for at, place in one.places.items()
        }


class CrateTensors(TensorKind):
    def describes(self, tensor):
        return isinstance(tensor, Place)

    def layout_of(self, tensor):
        # flat, and the same on every rank
        sharding = ReplicatedSharding((torch.Size(tensor.shape).numel(),))
        return TensorLayout(tensor.shape, tensor.dtype, True, True, "crate", sharding)

    def local_part(self, tensor):
        return tensor.buffer[tensor.first : tensor.first + torch.Size(tensor.shape).numel()]


@pytest.fixture
def _with_crates(monkeypatch):
    monkeypatch.setattr(wrappers, "WRAPPERS", [CrateWrapper(), *wrappers.WRAPPERS])
    kinds = [CrateTensors(), *tensor_kinds.TENSOR_KINDS]
    monkeypatch.setattr(tensor_kinds, "TENSOR_KINDS", kinds)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 2)))


@pytest.mark.usefixtures("_with_crates")
@pytest.mark.parametrize("around", [Crate, lambda model: nn.DataParallel(Crate(model))])
def test_a_model_under_a_new_kind_of_wrapper_is_saved(around, tmp_path):
    expected = {name: tensor.clone() for name, tensor in build().state_dict().items()}
    with CheckpointSaver() as saver:
        saver.save(around(build()), tmp_path / "out")
    (read,) = [ft_ckpt.load(file) for file in (tmp_path / "out").glob("*.safetensors")]
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in expected.items())


def test_wrappers_inside_a_model_leave_no_trace(tmp_path):
    """Not in the names of its tensors."""
    torch.manual_seed(0)
    layers = nn.Linear(3, 3), nn.Linear(3, 3)
    CheckpointSaver().save(nn.Sequential(nn.DataParallel(layers[0]), layers[1]), tmp_path / "out")
    loaded = ft_ckpt.load_model(
        tmp_path / "out", into=nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    )
    assert torch.equal(loaded[0].weight, layers[0].weight)


def test_an_unknown_wrapper_is_an_ordinary_module():
    assert wrappers.unwrap(outer := Crate(build())) is outer


@pytest.mark.parametrize(
    "around",
    [
        lambda model: model,
        nn.DataParallel,
        lambda model: nn.DataParallel(torch.compile(model, backend="eager")),
        lambda model: torch.compile(nn.DataParallel(model), backend="eager"),
        lambda model: nn.Sequential(*model[:2], nn.DataParallel(model[2])),
        lambda model: nn.Sequential(torch.compile(model[0], backend="eager"), *model[1:]),
    ],
)
def test_names_and_layouts_are_the_same_under_any_wrapper(around):
    bare, wrapped = ModelTensors(build()).sources(), ModelTensors(around(build())).sources()
    assert [facts(one) for one in bare.values()] == [facts(one) for one in wrapped.values()]


def facts(source):
    return (
        source.name,
        source.shape,
        source.dtype,
        source.trainable,
        source.is_parameter,
        source.sharding,
    )


def test_elements_are_taken_at_the_moment_of_use():
    model = build()
    sources = ModelTensors(model).sources()
    with torch.no_grad():
        model[0].weight.fill_(7.0)
    full = gather_tensors([sources["0.weight"]], current_ranks())
    assert full["0.weight"].unique().tolist() == [7.0]
    assert torch.equal(full_state_dict(model)["2.0.bias"], model[2][0].bias)


def test_a_source_gives_the_tensor_that_it_holds():
    model = build()
    source = ModelTensors(model).sources()["0.weight"]
    copy = torch.zeros_like(source.local)
    held = source.holding(copy)
    assert held.local is copy
    assert held.key == source.key
    assert held.holding(None).local is None


def test_ties_have_one_key():
    model = build()
    model[2][0].again = model[0].weight
    sources = ModelTensors(model).sources()
    assert sources["2.0.again"].key == sources["0.weight"].key != sources["2.0.weight"].key


def test_a_class_is_asked_again_whether_its_modules_list_more():
    late = type("Late", (nn.Linear,), {})
    model = late(2, 2)
    live = dict(model.named_parameters())
    assert added_state(model, live) == {}
    late.get_extra_state = lambda self: 7
    assert [one.value for one in added_state(model, live).values()] == [7]


def test_a_sparse_buffer_is_refused():
    model = nn.Linear(2, 2)
    model.register_buffer("odd", torch.eye(2).to_sparse())
    with pytest.raises(SelectionError, match="odd"):
        ModelTensors(model).sources()
