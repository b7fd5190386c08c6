"""Names carry no meaning: what torch allows as the name of a module is saved, resumed and told
apart from ours.
"""

from types import SimpleNamespace

import pytest
import torch
from compare import assert_same_tensors, stored
from peft import LoraConfig, get_peft_model
from torch import nn

import ft_ckpt
from ft_ckpt import CheckpointSaver, errors

NAMES = [
    "task:en",
    "a b",
    'say "hi"',
    "größe/日本",
    "weights",
    "rank-0",
    "_orig_mod",
    "_fsdp_wrapped_module",
    "model",
]


class Tasks(nn.Module):
    """A head for each of NAMES; parameters may have such names as well."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({name: nn.Linear(3, 3) for name in NAMES})
        self.odd = nn.ParameterDict({f"p {name}": nn.Parameter(torch.zeros(2)) for name in NAMES})
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(value + torch.rand(parameter.shape))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return sum(head(inputs).sum() for head in self.heads.values()) + sum(
            p.sum() for p in self.odd.values()
        )


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(torch.ones(1, 3)).square().backward()
    optimizer.step()
    return optimizer


def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [state["exp_avg"] for state in optimizer.state.values()]


@pytest.mark.parametrize("how", [{}, {"format": "h5"}, {"background": True}])
def test_colon_in_module_name(how, tmp_path):
    """Any name is saved: with the weights alone, in every format, and beside training."""
    model = Tasks(1)
    with CheckpointSaver(**how) as saver:
        saver.save(model, tmp_path / "out")
        saver.wait()
    loaded = ft_ckpt.load_model(tmp_path / "out", into=Tasks(0))
    assert_same_tensors(dict(loaded.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("background", [False, True])
def test_colon_in_a_resumed_run(background, tmp_path):
    """A run with a further model whose names are as odd; nothing of one is taken for the
    other's.
    """
    model, average = Tasks(1), Tasks(2)
    optimizer, second = stepped(model), stepped(average)
    with CheckpointSaver(directory=tmp_path, background=background) as saver:
        saver.register(model=model, optimizer=optimizer, average=average, second=second)
        saver.save_state()
    again, other = Tasks(3), Tasks(4)
    fresh, later = stepped(again), stepped(other)
    with CheckpointSaver(directory=tmp_path) as saver:
        saver.resume("must", model=again, optimizer=fresh, average=other, second=later)
    assert_same_tensors(dict(again.state_dict()), dict(model.state_dict()))
    assert_same_tensors(dict(other.state_dict()), dict(average.state_dict()))
    assert all(
        map(torch.equal, moments(fresh) + moments(later), moments(optimizer) + moments(second))
    )


def test_a_name_like_a_further_models_label(tmp_path):
    """A parameter of the saved model that is named like one of the further model `ema`."""
    models = [nn.ModuleDict({"ema:a": nn.Linear(2, 2)}), nn.ModuleDict({"a": nn.Linear(2, 2)})]
    optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], lr=1, momentum=0.9)
    sum(p.sum() * n for n, p in enumerate(p for m in models for p in m.parameters())).backward()
    optimizer.step()
    CheckpointSaver().save_state(models[0], tmp_path / "out", ema=models[1], optimizer=optimizer)
    again = [nn.ModuleDict({"ema:a": nn.Linear(2, 2)}), nn.ModuleDict({"a": nn.Linear(2, 2)})]
    fresh = torch.optim.SGD([p for m in again for p in m.parameters()], lr=1, momentum=0.9)
    CheckpointSaver().resume(tmp_path / "out", model=again[0], ema=again[1], optimizer=fresh)
    for one, other in zip(models, again, strict=True):
        assert_same_tensors(dict(other.state_dict()), dict(one.state_dict()))
    buffers = [
        [state["momentum_buffer"] for state in one.state.values()] for one in (fresh, optimizer)
    ]
    assert all(map(torch.equal, *buffers))


def test_lora_on_layers_with_such_names(tmp_path):
    """The adapter has all of its tensors, whatever the layers are called, and a run of it comes
    back.
    """

    def lora() -> nn.Module:
        config = LoraConfig(
            r=2, target_modules=[f"heads.{name}" for name in NAMES[:2]], init_lora_weights=False
        )
        torch.manual_seed(0)
        base = Tasks(1)
        torch.seed()  # the same base, and another adapter
        return get_peft_model(base, config)

    model = lora()
    CheckpointSaver().save(model, tmp_path / "adapter", adapter_only=True)
    names = set(stored(tmp_path / "adapter"))
    assert {
        f"base_model.model.heads.{n}.lora_{ab}.weight" for n in NAMES[:2] for ab in "AB"
    } == names
    CheckpointSaver().save_state(model, tmp_path / "state")
    again = lora()
    CheckpointSaver().resume(tmp_path / "state", model=again)
    want = {n: p for n, p in model.state_dict().items() if "lora" in n}
    assert_same_tensors({n: p for n, p in again.state_dict().items() if "lora" in n}, want)


def test_a_name_that_a_file_has_itself_is_refused(tmp_path):
    model = nn.ParameterDict({"__metadata__": nn.Parameter(torch.ones(2))})
    with pytest.raises(errors.SelectionError, match="__metadata__"):
        CheckpointSaver().save(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


RESERVED = [
    "weights",
    "rng",
    "gradients",
    "engine",
    "loader-0",
    "rank-1",
    "a:b",
    "a/b",
    "",
    "extra state",
]


@pytest.mark.parametrize("name", RESERVED)
def test_names_that_checkpoints_use_are_refused(name):
    saver = CheckpointSaver()
    with pytest.raises(
        errors.ConfigError, match=repr(name) if not name.isalpha() and name in ("", "a:b") else name
    ):
        saver.register(**{name: nn.Linear(2, 2)})


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2)


def prepared(**objects):
    """What an Accelerator shows of what it has prepared."""
    fields = {
        "_models": [],
        "_optimizers": [],
        "_schedulers": [],
        "_custom_objects": [],
        "_dataloaders": [],
    }
    return SimpleNamespace(**{**fields, **objects})


@pytest.mark.parametrize("name", ["scheduler", "optimizer", "model_1"])
def test_names_of_prepared_objects_are_refused(name, tmp_path):
    """Not found at the first resume, when the checkpoints of a whole run are lost."""
    model, other = nn.Linear(2, 2), nn.Linear(3, 2)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=1)
    second = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1)
    objects = {
        "_models": [model, other],
        "_optimizers": [optimizer],
        "_schedulers": [schedule(optimizer)],
    }
    saver = CheckpointSaver(prepared(**objects), tmp_path)
    taken = {"scheduler": schedule(optimizer), "optimizer": second, "model_1": nn.Linear(2, 2)}[
        name
    ]
    with pytest.raises(errors.ConfigError, match=name):
        saver.register(**{name: taken})
    saver.register(
        **{
            name: {
                "scheduler": objects["_schedulers"][0],
                "optimizer": optimizer,
                "model_1": other,
            }[name]
        }
    )
    saver.save_state()


def test_the_model_that_is_saved_may_be_prepared_second(tmp_path):
    """Registering it leaves none out: the one prepared first is a further model then."""
    models, again = [nn.Linear(2, 2), nn.Linear(3, 2)], [nn.Linear(2, 2), nn.Linear(3, 2)]
    CheckpointSaver(prepared(_models=models), tmp_path).save_state(models[1])
    CheckpointSaver(prepared(_models=again), tmp_path).resume("must", model=again[1])
    for one, other in zip(models, again, strict=True):
        assert_same_tensors(dict(other.state_dict()), dict(one.state_dict()))


class Counter:
    """A custom object of a run."""

    def __init__(self, **state) -> None:
        self.state = state

    def state_dict(self):
        return dict(self.state)

    def load_state_dict(self, state) -> None:
        self.state = dict(state)


def a_run(order: tuple[int, int]):
    """Two further models, two schedulers and two custom objects, prepared in `order`; no two are
    alike.
    """
    models = [nn.Linear(2, 2), nn.Sequential(nn.Linear(3, 3)), nn.Sequential(nn.Linear(4, 4))]
    optimizer = torch.optim.SGD([{"params": [*m.parameters()]} for m in models[1:]], lr=1)
    second = torch.optim.SGD(models[0].parameters(), lr=1)
    schedulers = [schedule(optimizer), schedule(second)]
    custom = [Counter(steps=1), Counter(tokens=2)]
    pick = lambda some: [some[index] for index in order]  # noqa: E731 - a word for what is done three times
    fields = {"_models": [models[0], *pick(models[1:])], "_optimizers": [optimizer, second]}
    fields |= {"_schedulers": pick(schedulers), "_custom_objects": pick(custom)}
    return prepared(**fields), models, schedulers, custom


def test_objects_prepared_in_another_order_are_told_apart(tmp_path):
    accelerator, models, schedulers, custom = a_run((0, 1))
    schedulers[0].last_epoch, schedulers[1].last_epoch = 5, 9
    CheckpointSaver(accelerator, tmp_path).save_state()
    other, again, later, found = a_run((1, 0))
    found[0].state, found[1].state = {"steps": 0}, {"tokens": 0}
    CheckpointSaver(other, tmp_path).resume("must")
    for one, now in zip(models, again, strict=True):
        assert_same_tensors(dict(now.state_dict()), dict(one.state_dict()))
    assert [one.last_epoch for one in later] == [5, 9]
    assert [one.state for one in found] == [one.state for one in custom]


def test_another_saved_model_than_before_fails_the_resume(tmp_path):
    """The weights of one would become the other's."""

    def twins() -> list[nn.Module]:
        return [nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)]

    models = twins()
    CheckpointSaver(prepared(_models=models), tmp_path).save_state()
    with pytest.raises(errors.LoadError, match="another order"):
        CheckpointSaver(prepared(_models=twins()[::-1]), tmp_path).resume("must")
    again = twins()[::-1]
    CheckpointSaver(prepared(_models=again), tmp_path).resume("must", model=again[1])
    assert_same_tensors(dict(again[1].state_dict()), dict(models[0].state_dict()))
    assert_same_tensors(dict(again[0].state_dict()), dict(models[1].state_dict()))


@pytest.mark.parametrize("kind", ["_models", "_schedulers", "_custom_objects"])
def test_alike_objects_are_asked_for_names(kind, tmp_path):
    """By their order alone a policy is taken for a value model of the same class."""
    policy, value = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(policy.parameters(), lr=1)
    objects = {
        "_models": [policy, value],
        "_schedulers": [schedule(optimizer), schedule(optimizer)],
    }
    objects["_custom_objects"] = [Counter(steps=1), Counter(steps=2)]
    accelerator = prepared(**{"_models": [policy], kind: objects[kind]}, _optimizers=[optimizer])
    with pytest.raises(errors.ConfigError, match="differ in their order alone"):
        CheckpointSaver(accelerator, tmp_path).save_state()
    saver = CheckpointSaver(accelerator, tmp_path)
    saver.register(second=objects[kind][1])
    saver.save_state()


def test_named_models_may_be_prepared_in_any_order(tmp_path):
    models, again = [nn.Linear(2, 2), nn.Linear(2, 2)], [nn.Linear(2, 2), nn.Linear(2, 2)]
    saver = CheckpointSaver(prepared(_models=models), tmp_path)
    saver.register(value=models[1])
    saver.save_state()
    CheckpointSaver(prepared(_models=again[::-1]), tmp_path).resume("must", value=again[1])
    for one, now in zip(models, again, strict=True):
        assert_same_tensors(dict(now.state_dict()), dict(one.state_dict()))
