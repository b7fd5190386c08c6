"""The model itself is the measure: all that torch's state dict lists is kept and comes back, or is
refused by name.
"""

import io

import models
import peft
import pytest
import torch
from compare import assert_same_tensors, reference, stored
from on_ranks import RANK, on_ranks
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from transformers import MixtralForCausalLM, Qwen3ForCausalLM
from wrappers import WRAPPERS, Live, truth

import ft_ckpt
from ft_ckpt import CheckpointSaver, errors
from ft_ckpt.errors import RanksDisagreeError
from ft_ckpt.runs.state import capture


class Scaled(nn.Linear):
    """A layer with extra state, as those of TransformerEngine have it: a tensor, or any simple
    tree.
    """

    def __init__(self, state, size: int = 4) -> None:
        super().__init__(size, size)
        self.state = state

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state) -> None:
        self.state = state


class Listed(nn.Linear):
    """A layer that saves and loads in a way of its own."""

    def __init__(self, scale: float = 0.0) -> None:
        super().__init__(4, 4)
        self.scale = scale

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}scale"] = torch.tensor(self.scale)

    def _load_from_state_dict(self, state, prefix, *rest) -> None:
        self.scale = float(state.pop(f"{prefix}scale", torch.tensor(self.scale)))
        super()._load_from_state_dict(state, prefix, *rest)


TREE = {"amax": torch.arange(3.0), "steps": 7, "names": ["a", None, (1.5, True)]}
MAKERS = {
    "tensor": lambda old: Scaled(torch.arange(5.0) if old else torch.zeros(5)),
    "tree": lambda old: Scaled(TREE if old else None),
    "bytes": lambda old: Scaled(b"fp8 \x00\xff" if old else b""),
    "own way": lambda old: Listed(3.5 if old else 0.0),
}


def listed(model: nn.Module):
    """The state dict as plain values that compare."""
    return {
        name: value.tolist() if isinstance(value, torch.Tensor) else repr(value)
        for name, value in model.state_dict().items()
    }


def stack(kind: str, old: bool) -> nn.Module:
    torch.manual_seed(1 if old else 2)
    return nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"deep:er": MAKERS[kind](old)}))


@pytest.mark.parametrize("kind", MAKERS)
def test_what_modules_and_hooks_add_is_resumed(kind, tmp_path):
    """For the model that is saved, and for a further one."""
    model, further = stack(kind, True), stack(kind, True)
    CheckpointSaver().save_state(model, tmp_path / "out", further=further)
    again, other = stack(kind, False), stack(kind, False)
    CheckpointSaver().resume(tmp_path / "out", model=again, further=other)
    assert listed(again) == listed(model)
    assert listed(other) == listed(further)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("background", [False, True])
def test_what_modules_and_hooks_add_is_loaded(kind, background, tmp_path):
    model = stack(kind, True)
    with CheckpointSaver(background=background) as saver:
        saver.save(model, tmp_path / "out")
        saver.wait()
    again = ft_ckpt.load_model(tmp_path / "out", into=stack(kind, False))
    assert listed(again) == listed(model)
    tensors = {
        name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)
    }
    assert_same_tensors(stored(tmp_path / "out"), tensors)


@pytest.fixture
def making(monkeypatch):
    """Give models of transformers another layer, made as the function says that is passed."""

    def start(maker) -> None:
        for cls in (MixtralForCausalLM, Qwen3ForCausalLM):
            monkeypatch.setattr(cls, "__init__", with_layer(cls.__init__, maker))

    def with_layer(make, maker):
        def wrapped(self, config, *args, **kwargs) -> None:
            make(self, config, *args, **kwargs)
            self.model.layers[1].more = maker()

        return wrapped

    return start


def test_an_extra_state_that_is_a_tensor_is_saved_as_transformers_does(making, tmp_path):
    making(lambda: Scaled(torch.arange(5.0), 24))
    model = models.build("qwen3")
    CheckpointSaver().save(model, tmp_path / "ours")
    ours = stored(tmp_path / "ours")
    assert "model.layers.1.more._extra_state" in ours
    assert_same_tensors(ours, reference(model, tmp_path / "theirs"))


@pytest.mark.sample(10)
@pytest.mark.parametrize("layout", ["safetensors", "h5"])
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
@pytest.mark.parametrize("kind", MAKERS)
def test_models_that_transformers_converts_get_it_back(
    kind, name, adapted, layout, making, tmp_path
):
    """Of mixtral it places the tensors itself; beside an adapter the base has it."""
    model = models.build(name)
    model.model.layers[1].more = MAKERS[kind](True)
    making(lambda: MAKERS[kind](True))
    if adapted:
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
        )
    CheckpointSaver(format=layout).save(
        model, tmp_path / "out", adapter_only=False if adapted else None
    )
    making(lambda: MAKERS[kind](False))
    again = ft_ckpt.load_model(tmp_path / "out")
    assert listed(again) == listed(model)
    assert {n for n, _ in again.named_parameters()} == {n for n, _ in model.named_parameters()}


@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_what_the_class_does_not_list_fails_the_load(name, making, tmp_path):
    model = models.build(name)
    model.model.layers[1].more = MAKERS["tree"](True)
    CheckpointSaver().save(model, tmp_path / "out")
    making(lambda: nn.Linear(4, 4))
    with pytest.raises(errors.LoadError, match=r"layers\.1\.more\._extra_state: not in the model"):
        ft_ckpt.load_model(tmp_path / "out")
    _, report = ft_ckpt.load_model(tmp_path / "out", strict=False, with_report=True)
    assert report.unexpected == ("model.layers.1.more._extra_state",)


def test_extra_state_of_a_quantised_model_is_refused(making, tmp_path):
    """Its loading is for transformers, which knows of no extra state."""
    model = models.build("qwen3")
    model.model.layers[1].more = MAKERS["tree"](True)
    making(lambda: MAKERS["tree"](True))
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    packed = type("Linear4bit", (nn.Linear,), {})(24, 36, bias=False)  # it is told by its layers
    model.model.layers[0].mlp.up_proj = packed
    CheckpointSaver().save(model, tmp_path / "out")
    with pytest.raises(
        errors.LoadError,
        match=r"layers\.1\.more\._extra_state: non-tensor state of a quantised model",
    ):
        ft_ckpt.load_model(tmp_path / "out")


def test_adapters_of_a_base_with_single_numbers_are_saved(tmp_path):
    """As BatchNorm counts its batches."""
    model = models.build("qwen3")
    model.model.norms = nn.BatchNorm1d(3)
    model = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    )
    CheckpointSaver().save(model, tmp_path / "ours", adapter_only=True)
    assert_same_tensors(stored(tmp_path / "ours"), reference(model, tmp_path / "theirs"))


def test_extra_state_of_a_base_is_named_where_its_adapter_is_saved(tmp_path):
    model = models.build("qwen3")
    model.model.layers[1].more = MAKERS["tree"](True)
    model.model.layers[1].more.requires_grad_(False)
    model = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    )
    report = CheckpointSaver().save(model, tmp_path / "out", adapter_only=True)
    (note,) = report.notes
    assert note == (
        "model.layers.1.more._extra_state: state of the base that is no tensor, not in an "
        "adapter's file"
    )


def test_extra_state_of_an_adapter_equal_to_that_of_its_base_is_refused(tmp_path):
    model = models.build("qwen3")
    model.model.layers[1].more = Scaled(None)
    model = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    )
    model.base_model.model.model.layers[0].self_attn.q_proj.lora_A["default"] = Scaled(None)
    with pytest.raises(
        errors.SelectionError, match=r"lora_A\.default\._extra_state: state of an adapter"
    ):
        CheckpointSaver().save(model, tmp_path / "out", adapter_only=True)


@pytest.mark.parametrize("state", [io.BytesIO(b"x"), {"f": print}])
def test_extra_state_that_cannot_be_kept_is_refused(state, tmp_path):
    model = nn.Sequential(Scaled(state))
    for save in (CheckpointSaver().save, CheckpointSaver().save_state):
        with pytest.raises(errors.SelectionError, match=r"0\._extra_state"):
            save(model, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_what_a_hook_adds_is_refused_by_name(tmp_path):
    """A hook that lists the model's own tensors under another name, as quantisers do, adds
    nothing.
    """
    model = nn.Sequential(nn.Linear(2, 2))
    weight = model[0].weight
    model[0].register_state_dict_post_hook(
        lambda module, state, prefix, _: state.update({f"{prefix}again": weight})
    )
    CheckpointSaver().save(model, tmp_path / "whole")
    model[0].register_state_dict_post_hook(
        lambda module, state, prefix, _: state.update({f"{prefix}count": 1})
    )
    for save in (CheckpointSaver().save, CheckpointSaver().save_state):
        with pytest.raises(
            errors.SelectionError, match=r"0\.count \(Linear\): added by a hook of state_dict\(\)"
        ):
            save(model, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_extra_state_without_a_way_back_is_refused(tmp_path):
    class OneWay(nn.Linear):
        def get_extra_state(self):
            return torch.ones(2)

    with pytest.raises(errors.SelectionError, match="_extra_state"):
        CheckpointSaver().save_state(OneWay(2, 2), tmp_path / "out")


def test_a_model_that_lists_less_is_saved_whole(tmp_path):
    """As scripts do that replace `state_dict` to save adapters alone."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    full = dict(model.state_dict())
    model.state_dict = lambda *args, **kwargs: {"renamed": full["0.weight"]}
    CheckpointSaver().save(model, tmp_path / "out")
    assert_same_tensors(stored(tmp_path / "out"), full)


@pytest.mark.parametrize("what", ["frozen layer", "buffer"])
def test_what_the_checkpoint_lacks_fails_the_resume(what, tmp_path):
    """Not only what is trained: a frozen layer and a buffer would stay random."""
    model, more = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    CheckpointSaver().save_state(model, tmp_path / "out")
    if what == "buffer":
        more[0].register_buffer("extra", torch.rand(2))
    else:
        more.extra = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(errors.LoadError, match=r"extra.*not in the checkpoint"):
        CheckpointSaver().resume(tmp_path / "out", model=more)


def test_a_further_model_that_differs_fails_the_resume(tmp_path):
    CheckpointSaver().save_state(nn.Linear(2, 2), tmp_path / "out", ema=nn.Linear(2, 2))
    with pytest.raises(errors.LoadError, match="bias: in the checkpoint, not in the model"):
        CheckpointSaver().resume(
            tmp_path / "out", model=nn.Linear(2, 2), ema=nn.Linear(2, 2, bias=False)
        )


@pytest.mark.parametrize("name", ["llama", "partly_frozen"])
def test_a_further_model_with_ties_is_resumed(name, tmp_path):
    model, average = models.build(name), models.build(name, seed=1)
    CheckpointSaver().save_state(model, tmp_path / "out", ema=average)
    again = models.build(name, seed=2)
    CheckpointSaver().resume(tmp_path / "out", model=models.build(name, seed=3), ema=again)
    assert_same_tensors(dict(again.state_dict()), dict(average.state_dict()))
    assert again.lm_head.weight is again.model.embed_tokens.weight


def test_a_further_model_stored_under_its_last_tied_name_is_resumed(tmp_path, monkeypatch):
    """As version 0.1.0 stored it."""
    monkeypatch.setattr(
        capture,
        "tied_names",
        lambda found, old=capture.tied_names: [group[::-1] for group in old(found)],
    )
    average = models.build("llama", seed=1)
    CheckpointSaver().save_state(models.build("llama"), tmp_path / "out", ema=average)
    monkeypatch.undo()
    again = models.build("llama", seed=2)
    CheckpointSaver().resume(tmp_path / "out", model=models.build("llama", seed=3), ema=again)
    assert_same_tensors(dict(again.state_dict()), dict(average.state_dict()))


@pytest.mark.parametrize("save", ["save", "save_state"])
def test_tensors_without_values_are_refused_by_name(save, tmp_path):
    lazy = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))
    sparse = nn.Sequential(nn.Linear(2, 2))
    sparse[0].register_buffer("mask", torch.eye(3).to_sparse())
    for model, name in ((lazy, r"1\.weight"), (sparse, r"0\.mask")):
        with pytest.raises(errors.CheckpointError, match=name):
            getattr(CheckpointSaver(), save)(model, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_expanded_tensors_come_back(tmp_path):
    def make(value: float) -> nn.Module:
        model = nn.Linear(2, 2)
        model.register_buffer("table", torch.full((1, 3), value).expand(4, 3))
        model.scale = nn.Parameter(torch.full((), value).expand(5), requires_grad=False)
        return model

    model, again = make(7.0), make(0.0)
    CheckpointSaver().save_state(model, tmp_path / "out")
    CheckpointSaver().resume(tmp_path / "out", model=again)
    assert_same_tensors(dict(again.state_dict()), dict(model.state_dict()))
    assert again.table.stride() == (0, 1)


def test_an_expanded_tensor_does_not_take_other_values(tmp_path):
    model, again = nn.Linear(2, 2), nn.Linear(2, 2)
    model.register_buffer("table", torch.rand(4, 3))
    again.register_buffer("table", torch.rand(1, 3).expand(4, 3))
    CheckpointSaver().save_state(model, tmp_path / "out")
    with pytest.raises(errors.LoadError, match="table"):
        CheckpointSaver().resume(tmp_path / "out", model=again)


QUIET = {"enter_timeout_seconds": 60, "on_difference": "ignore"}
NAMES = ["task:en", "a/b", "größe 1", "weights", "rank-0"]


class ScaledByRank(nn.Linear):
    """A layer with extra state that differs by rank."""

    def __init__(self, amax):
        super().__init__(6, 6)
        self.amax = torch.full((3,), amax)

    def get_extra_state(self):
        return self.amax

    def set_extra_state(self, state):
        self.amax = state.clone()


class Unusual(nn.Module):
    """Layers with unusual names, a tie, a buffer, and a name that the model lists in its own
    way.
    """

    def __init__(self, value):
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(6, 6) for name in NAMES})
        self.scaled, self.count = ScaledByRank(value + RANK), torch.tensor(value)
        self.layers["tied"] = nn.Linear(6, 6)
        self.layers["tied"].weight = self.layers["task:en"].weight
        self.register_buffer("mean", torch.full((5,), value))
        torch.manual_seed(int(value))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.rand(parameter.shape))

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}count"] = self.count.clone()

    def _load_from_state_dict(self, state, prefix, *rest):
        self.count = state.pop(f"{prefix}count", self.count).clone()
        super()._load_from_state_dict(state, prefix, *rest)

    def forward(self, inputs):
        return sum(layer(inputs).square().mean() for layer in (*self.layers.values(), self.scaled))


def wrapped(wrapper, value):
    model = Unusual(value)
    if wrapper == "zero3":
        return WRAPPERS["zero3"](model).model
    if wrapper == "fsdp2":
        return fully_shard(model)
    if wrapper == "fsdp1":
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    return nn.parallel.DistributedDataParallel(model)


def inside(model):
    return model if isinstance(model, Unusual) else model.module


@pytest.mark.sample("fsdp2")
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2", "fsdp1", "zero3"])
@on_ranks(2)
def test_every_entry_is_saved_and_resumed_under_wrappers(tmp_path, wrapper):
    """Files have every entry of the bare model's state dict; a resume gives each rank its own
    values.
    """
    model, again = wrapped(wrapper, 3), wrapped(wrapper, 8)
    CheckpointSaver(**QUIET).save(model, tmp_path / "full")
    files = load_file(tmp_path / "full" / "model.safetensors")
    bare = Unusual(3).state_dict()
    bare["scaled._extra_state"] = torch.full((3,), 3.0)  # rank 0's
    assert files.keys() == bare.keys() - {"layers.tied.weight"}, files.keys() ^ bare.keys()
    assert all(torch.equal(files[name], bare[name]) for name in files)
    CheckpointSaver(**QUIET).save_state(model, tmp_path / "state")
    CheckpointSaver(**QUIET).resume(tmp_path / "state", model=again)
    before, after = truth_of(model), truth_of(again)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert inside(again).count.item() == 3
    assert inside(again).scaled.amax.tolist() == [3.0 + RANK] * 3


def truth_of(model):
    return truth(Live(model, None))


@pytest.mark.sample("save_state")
@pytest.mark.parametrize("save", ["save", "save_state"])
@on_ranks(2)
def test_tensors_of_one_rank_alone_are_refused(tmp_path, save):
    """As under pipeline parallelism: tensors of one rank alone are refused by name."""
    model = nn.ModuleDict({"both": nn.Linear(2, 2), f"layer {RANK}": nn.Linear(2, 2)})
    with pytest.raises(
        RanksDisagreeError, match=r"layer 1.weight, layer 1.bias on rank\(s\) 1 alone"
    ):
        getattr(CheckpointSaver(**QUIET), save)(model, tmp_path / "out")


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
def test_a_report_says_whether_the_files_are_mapped(tmp_path, device):
    CheckpointSaver().save(models.build("llama"), tmp_path / "out")
    assert ft_ckpt.load_model(tmp_path / "out", device=device, mapped=True, with_report=True)[
        1
    ].zero_copy
