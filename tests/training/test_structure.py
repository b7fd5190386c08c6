"""What is kept between saves: no change of the files goes unnoticed, and nothing is held."""

import gc
import json
import weakref
from collections import Counter

import models
import peft
import pytest
import torch
from torch import nn
from transformers.core_model_loading import WeightRenaming

from ft_ckpt import CheckpointSaver, verify
from ft_ckpt.distributed.inventory import Inventory
from ft_ckpt.distributed.stand_ins import stand_in_parameter
from ft_ckpt.training.signature import PlanCache, Signer


class Run:
    """A small language model that is trained, and its saver."""

    def __init__(self, folder):
        self.folder, self.model, self.count = folder, models.build("qwen3"), 0
        self.tokenizer, self.further = models.tokenizer(), {}
        self.saver = new_saver(folder, self.tokenizer)
        self.begin()

    def begin(self, kind=torch.optim.AdamW, **settings):
        self.optimizer = kind([p for p in self.model.parameters() if p.requires_grad], lr=0.01, **settings)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (step + 1))

    def step(self):
        self.model(**models.batch(seed=self.count)).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def save(self, kind, background, saver=None):
        self.count += 1
        saver, target = saver or self.saver, self.folder / f"{self.count}"
        objects = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, **self.further}
        if kind == "run":
            saver.save_state(path=target, background=background, adapter_only=False, **objects)
        else:
            saver.save(self.model, target, background=background, adapter_only=kind == "adapters")
        saver.wait()
        return target

    def compare(self):
        """Saves that know the structure write what a new saver does, which knows nothing, at the same moment."""
        for kind in ("run", "weights", *(["adapters"] if hasattr(self.model, "peft_config") else [])):
            with new_saver(self.folder, self.tokenizer) as stranger:
                expected = contents(self.save(kind, False, stranger))
            for background in (True, False):
                target = self.save(kind, background)
                assert verify(target).ok
                found = contents(target)
                assert [name for name in {*found, *expected} if found.get(name) != expected.get(name)] == []

    @property
    def known(self):
        """How often something was found out anew and kept, by what it is."""
        return Counter(self.saver._pending.cache.kept)


def new_saver(folder, tokenizer=None):
    return CheckpointSaver(None, folder, tokenizer=tokenizer, on_difference="ignore", reuse_frozen="off")


def contents(folder):
    return {str(file.relative_to(folder)): content(file) for file in folder.rglob("*") if file.is_file()}


def content(file):
    """All but times."""
    data = file.read_bytes()
    if file.name == "ft_ckpt.json":
        return json.loads(data)["parts"]
    return data[: data.index(b'"history"')] if file.name == "training.json" else data


@pytest.fixture
def run(tmp_path):
    made = Run(tmp_path)
    made.step()
    made.compare()
    with made.saver:
        yield made


# What makes no difference to a plan


def a_step(run):
    run.step()


def other_memory(run):
    for parameter in run.model.parameters():
        parameter.data = parameter.data + 1


def other_rates(run):
    run.optimizer.param_groups[0]["lr"] = 7.0


def a_twin_of_a_parameter(run):
    norm = run.model.model.norm
    group = run.optimizer.param_groups[0]["params"]
    place = next(i for i, one in enumerate(group) if one is norm.weight)
    state = run.optimizer.state
    twins = {p: nn.Parameter(p.detach() * 2) if p is norm.weight else p for p in state}
    norm.weight = group[place] = twins[norm.weight]
    run.optimizer.state = type(state)(dict, {twins[p]: value for p, value in state.items()})


@pytest.mark.parametrize("change", [a_step, other_memory, other_rates, a_twin_of_a_parameter])
def test_a_plan_is_taken_again_with_the_tensors_of_the_moment(run, change):
    before = run.known
    change(run)
    run.compare()
    assert run.known == before


# What does


def frozen(run):
    run.model.model.norm.weight.requires_grad_(False)


def unfrozen_again(run):
    frozen(run)
    run.compare()
    run.model.model.norm.weight.requires_grad_(True)


def another_parameter(run):
    layer = run.model.model.layers[0].mlp.down_proj
    layer.weight = nn.Parameter(layer.weight.detach().to(torch.bfloat16))
    run.begin()


def another_dtype(run):
    run.model.model.norm.weight.data = run.model.model.norm.weight.data.double()


def resized(run):
    run.model.resize_token_embeddings(run.model.config.vocab_size + 5)
    run.begin()


def tied_or_not(run):
    embedding, head = run.model.get_input_embeddings(), run.model.get_output_embeddings()
    is_tied = head.weight is embedding.weight
    head.weight = nn.Parameter(embedding.weight.detach().clone()) if is_tied else embedding.weight
    run.model.config.tie_word_embeddings = not is_tied
    run.begin()


def a_buffer(run):
    run.model.model.register_buffer("seen", torch.ones(3))


def a_layer(run):
    run.model.model.extra = nn.Linear(3, 3)


def an_adapter(run):
    run.model = peft.get_peft_model(run.model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    run.begin()


def a_second_adapter(run):
    an_adapter(run)
    run.compare()
    run.model.add_adapter("second", peft.LoraConfig(r=3, target_modules=["k_proj"]))


def another_adapter_in_use(run):
    a_second_adapter(run)
    run.compare()
    run.model.set_adapter("second")
    run.begin()


def a_trained_base(run):
    an_adapter(run)
    run.compare()
    run.model.get_base_model().model.norm.weight.requires_grad_(True)
    run.begin()


def rows_below_an_adapter(run):
    an_adapter(run)
    run.compare()
    run.model.get_base_model().resize_token_embeddings(run.model.config.vocab_size + 5)
    run.begin()


def another_place_of_the_base(run):
    an_adapter(run)
    run.compare()
    run.model.peft_config["default"].base_model_name_or_path = "org/other"


def what_is_left_out(run):
    run.model._keys_to_ignore_on_save = {"model.norm.weight"}


def what_the_class_leaves_out(run):
    kind = type(run.model)
    run.model.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__})
    vars(run.model).pop("_keys_to_ignore_on_save", None)
    run.compare()
    type(run.model)._keys_to_ignore_on_save = ["model.layers.0.mlp.up_proj.weight"]


def what_is_left_out_in_place(run):
    run.model._keys_to_ignore_on_save = {"model.norm.weight"}
    run.compare()
    run.model._keys_to_ignore_on_save.add("lm_head.weight")


def names_of_ties(run):
    run.model.all_tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}


def kept_in_float32(run):
    run.model._keep_in_fp32_modules_strict = {"norm"}


def a_setting_of_the_config(run):
    run.model.config.tie_word_embeddings = not run.model.config.tie_word_embeddings


def a_nested_setting(run):
    run.model.config.more = {"deep": [1]}
    run.compare()
    run.model.config.more["deep"].append(2)


def a_generation_setting(run):
    run.model.generation_config.max_length = 77


def a_conversion(run):
    run.model._weight_conversions = [WeightRenaming(r"mlp\.(.*)_proj", r"feed.\1_proj")]


def a_setting_of_an_adapter(run):
    an_adapter(run)
    run.compare()
    run.model.peft_config["default"].modules_to_save = ["lm_head"]


def an_adapter_renamed(run):
    a_second_adapter(run)
    run.compare()
    run.model.delete_adapter("second")


def a_module_trained_whole(run):
    run.model = peft.get_peft_model(
        run.model, peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    )
    run.begin()


def rows_trained_alone(run):
    run.model = peft.get_peft_model(run.model, peft.LoraConfig(r=2, trainable_token_indices=[3, 5]))
    run.begin()


def a_method_of_the_model(run):
    run.model.get_output_embeddings = lambda: None


def an_attribute_of_any_module(run):
    run.model.model.norm.remembers = {"what": [1]}
    run.compare()
    run.model.model.norm.remembers["what"].append(2)


def an_attribute_of_the_class_of_any_module(run):
    kind = type(run.model.model.norm)
    run.model.model.norm.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, "remembers": [1]})
    run.compare()
    type(run.model.model.norm).remembers.append(2)


def a_method_of_the_class(run):
    kind = type(run.model)
    run.model.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__})
    run.compare()
    type(run.model).get_output_embeddings = lambda self: None


def a_buffer_that_is_not_stored(run):
    run.model.model.register_buffer("seen", torch.ones(3))
    run.compare()
    run.model.model.register_buffer("seen", torch.ones(3), persistent=False)


CHANGES = [
    *(an_attribute_of_any_module, an_attribute_of_the_class_of_any_module, a_method_of_the_class),
    a_buffer_that_is_not_stored,
    *(frozen, unfrozen_again, another_parameter, another_dtype, resized, tied_or_not, a_buffer, a_layer),
    *(an_adapter, a_second_adapter, another_adapter_in_use, a_trained_base, rows_below_an_adapter),
    *(another_place_of_the_base, what_is_left_out, what_the_class_leaves_out, what_is_left_out_in_place),
    *(names_of_ties, kept_in_float32, a_setting_of_the_config, a_nested_setting, a_conversion),
    a_generation_setting,
    *(a_setting_of_an_adapter, an_adapter_renamed, a_module_trained_whole, rows_trained_alone, a_method_of_the_model),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_model_is_noticed(run, change):
    before = run.known
    change(run)
    run.compare()
    assert run.known["run"] > before["run"]
    assert run.known["plan"] > before["plan"] + 1  # of the run, and of the weights


def test_a_change_of_the_class_of_a_config_is_noticed(run, monkeypatch):
    monkeypatch.setattr(type(run.model.config), "remembers", [1], raising=False)
    run.compare()
    before = run.known
    type(run.model.config).remembers.append(2)
    run.compare()
    assert run.known["plan"] > before["plan"] + 1


def a_parameter_of_zero(model):
    model[0].weight.ds_shape = (2, 2)


def a_stand_in(model):
    model[0].weight = stand_in_parameter((2, 2), torch.float32, lambda: torch.ones(2, 2))


def a_sparse_buffer(model):
    model.register_buffer("odd", torch.eye(2).to_sparse())


def a_lazy_module(model):
    model.append(nn.LazyLinear(2))


@pytest.mark.parametrize("change", [a_parameter_of_zero, a_stand_in, a_sparse_buffer, a_lazy_module])
def test_tensors_that_facts_do_not_tell_have_no_signature(change):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    signatures = []
    for _ in range(2):
        signer = Signer(PlanCache())
        signer.note_model(model)
        signatures.append(signer.signature())
        change(model)
    assert [one is None for one in signatures] == [False, True]


def more_tokens(run):
    run.tokenizer.add_tokens(["<new>"])


def a_chat_template(run):
    run.tokenizer.chat_template = "{{ other }}"


def another_special_token(run):
    run.tokenizer.pad_token = "w1"


@pytest.mark.parametrize("change", [more_tokens, a_chat_template, another_special_token])
def test_a_tokenizer_is_of_the_moment(run, change):
    before = run.known
    change(run)
    run.compare()
    assert run.known == before


def more_state(run):
    for state in run.optimizer.state.values():
        state["more"] = torch.ones(2)


def less_state(run):
    run.optimizer.state.pop(run.model.model.norm.weight)


def state_in_another_dtype(run):
    state = run.optimizer.state[run.model.model.norm.weight]
    state["exp_avg"] = state["exp_avg"].double()


def another_group(run):
    run.optimizer.add_param_group({"params": [run.optimizer.param_groups[0]["params"].pop()], "lr": 1.0})


def another_optimizer(run):
    run.begin(torch.optim.SGD, momentum=0.5)
    run.step()


def another_object(run):
    run.further = {"average": nn.Linear(2, 2)}


@pytest.mark.parametrize(
    "change", [more_state, less_state, state_in_another_dtype, another_group, another_optimizer, another_object]
)
def test_a_change_beside_the_model_is_noticed(run, change):
    before = run.known
    change(run)
    run.compare()
    assert run.known["run"] > before["run"]


@pytest.mark.parametrize("kind", ["run", "weights"])
@pytest.mark.parametrize("background", [True, False])
def test_a_save_walks_over_the_model_once(run, monkeypatch, kind, background):
    walks, real = [], Inventory.note_model
    monkeypatch.setattr(Inventory, "note_model", lambda *given: (walks.append(given), real(*given))[1])
    run.save(kind, background)
    with new_saver(run.folder) as stranger:  # which has no plan yet
        run.save(kind, background, stranger)
    assert len(walks) == 2


def test_what_cannot_be_described_is_planned_every_time(run):
    run.model.model.norm.remembers = (number for number in ())
    before = run.known
    run.compare()
    assert run.known == before


def test_plans_hold_no_tensors_and_no_modules(run):
    for answer in run.saver._pending.cache._made.values():
        found = [one for one in gc_reachable(answer) if isinstance(one, (torch.Tensor, nn.Module))]
        assert not found


def gc_reachable(root):
    seen, waiting = {}, [root]
    while waiting:
        one = waiting.pop()
        if id(one) not in seen and not isinstance(one, (type, type(gc))) and not callable(one):
            seen[id(one)] = one
            waiting += gc.get_referents(one)
    return seen.values()


def test_a_rate_that_cannot_be_kept_is_refused_as_ever(run):
    run.optimizer.param_groups[0]["lr"] = object()
    with pytest.raises(Exception, match="lr is a object"):
        run.save("run", True)


def test_state_that_facts_do_not_tell_is_looked_up_every_time(run):
    for state in run.optimizer.state.values():
        state["bounds"] = (1, 2)
    before = run.known
    run.compare()
    assert run.known["run"] == before["run"]


def test_nothing_is_held(tmp_path):
    run = Run(tmp_path)
    run.step()
    with run.saver:
        model = models.build("qwen3")
        run.saver.save(model, tmp_path / "other", background=True)
        run.saver.wait()
        run.compare()
        parameter = run.model.model.norm.weight
        held = [weakref.ref(model), weakref.ref(parameter.data.untyped_storage())]
        parameter.data = parameter.data.clone()
        model = None
        gc.collect()
        assert [one() for one in held] == [None, None]
