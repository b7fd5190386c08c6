"""A new kind of wrapper is a class and a line in the list; a walk gives the same names and keys under all of them."""

import pickle

import pytest
import torch
from torch import Tensor, nn

import ft_ckpt
from ft_ckpt import CheckpointSaver
from ft_ckpt.distributed import wrappers
from ft_ckpt.distributed.added_state import added_state
from ft_ckpt.distributed.gather import full_state_dict, gather_tensors
from ft_ckpt.distributed.inventory import Inventory
from ft_ckpt.distributed.ranks import current_ranks
from ft_ckpt.distributed.sharding import ReplicatedSharding
from ft_ckpt.distributed.wrapper_protocol import TensorLayout, Wrapper
from ft_ckpt.errors import SelectionError


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
        self.buffer, self.first, self.shape, self.dtype = buffer, first, tuple(parameter.shape), parameter.dtype


class CrateWrapper(Wrapper):
    child_key = "content"

    def wraps(self, module):
        return isinstance(module, Crate)

    def tensors_of_modules(self, modules):
        return {at: place for one in modules if isinstance(one, Crate) for at, place in one.places.items()}

    def describes(self, tensor):
        return isinstance(tensor, Place)

    def layout_of(self, tensor):
        sharding = ReplicatedSharding((torch.Size(tensor.shape).numel(),))  # flat, and the same on every rank
        return TensorLayout(tensor.shape, tensor.dtype, True, True, "crate", sharding)

    def local_part(self, tensor):
        return tensor.buffer[tensor.first : tensor.first + torch.Size(tensor.shape).numel()]


@pytest.fixture
def _with_crates(monkeypatch):
    monkeypatch.setattr(wrappers, "WRAPPERS", [CrateWrapper(), *wrappers.WRAPPERS])


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
    """Neither in the names of its tensors nor in the description it is built again from."""
    torch.manual_seed(0)
    layers = nn.Linear(3, 3), nn.Linear(3, 3)
    CheckpointSaver().save(nn.Sequential(nn.DataParallel(layers[0]), layers[1]), tmp_path / "out")
    loaded = ft_ckpt.load_model(tmp_path / "out")
    assert [type(layer) for layer in loaded] == [nn.Linear, nn.Linear]
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
def test_names_and_keys_are_the_same_under_any_wrapper(around):
    bare, wrapped = Inventory(), Inventory()
    bare.note_model(build())
    wrapped.note_model(around(build()))
    facts = [[(i.key, i.name, i.shape, i.dtype, i.sharding) for i in one.infos().values()] for one in (bare, wrapped)]
    assert facts[0] == facts[1]


def test_descriptions_are_data():
    model = build()
    first, again = Inventory(), Inventory()
    first.note_model(model)
    again.note_model(build())
    assert first.infos() == again.infos()
    assert {hash(info) for info in first.infos().values()} == {hash(info) for info in again.infos().values()}
    assert pickle.loads(pickle.dumps(first.infos())) == again.infos()


def test_tensors_are_found_by_key_at_the_moment_of_use():
    model = build()
    inventory = Inventory()
    inventory.note_model(model)
    infos = inventory.infos()
    with torch.no_grad():
        model[0].weight.fill_(7.0)
    full = gather_tensors([infos["0.weight"]], current_ranks(), 64, inventory)
    assert full["0.weight"].unique().tolist() == [7.0]
    assert torch.equal(full_state_dict(model)["2.0.bias"], model[2][0].bias)


def test_ties_and_other_tensors_have_keys():
    model, moments, run = build(), torch.ones(3), torch.arange(4.0)
    model[2][0].again = model[0].weight
    inventory = Inventory()
    inventory.note_model(model)
    infos = inventory.infos()
    assert infos["2.0.again"].key == infos["0.weight"].key != infos["2.0.weight"].key
    keys = [*inventory.keys_of([moments]), inventory.note_run(run, run[1:3]), inventory.note_run(run, run[3:])]
    assert len({*keys, *(info.key for info in infos.values())}) == 3 + len(infos) - 1
    assert inventory.keys_of([moments]) == keys[:1]
    assert [inventory.local(key).tolist() for key in keys] == [[1.0] * 3, [1.0, 2.0], [3.0]]


def test_a_run_is_found_again_in_the_shape_of_its_box():
    buffer = torch.arange(12.0).view(3, 4)
    inventory, again = Inventory(), Inventory()
    keys = [inventory.note_run(buffer, buffer.view(-1)[2:8].view(3, 2)), inventory.note_run(buffer, None)]
    with torch.no_grad():
        buffer += 1
    assert inventory.local(keys[0]).tolist() == [[3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]
    assert inventory.memories(keys).keys() == {keys[0]}
    other = buffer * 10  # of a later moment
    assert again.keys_of([other]) == inventory.keys_of([buffer])
    again.note_runs(inventory.runs)
    assert again.local(keys[0]).tolist() == [[30.0, 40.0], [50.0, 60.0], [70.0, 80.0]]
    with pytest.raises(SelectionError, match="no run of it"):
        inventory.note_run(buffer, buffer[:, 1:3])


def test_a_class_is_asked_again_whether_its_modules_list_more():
    late = type("Late", (nn.Linear,), {})
    model = late(2, 2)
    live = dict(model.named_parameters())
    assert added_state(model, live) == {}
    late.get_extra_state = lambda self: 7
    assert [one.value for one in added_state(model, live).values()] == [7]


def test_a_walk_notes_without_a_look_at_layouts():
    """A save by a plan that is there already needs no description; tensors are refused when one is made."""
    model = nn.Linear(2, 2)
    model.register_buffer("odd", torch.eye(2).to_sparse())
    inventory = Inventory()
    assert inventory.note_model(model).tensors == [("weight", "bias", "odd")]
    with pytest.raises(SelectionError, match="odd"):
        inventory.infos()
