"""Submodels by name: a policy, a value head, a trunk two of them share."""

import models
import pytest
import torch
from architectures import ARCHITECTURES, make
from compare import assert_agree, assert_same_tensors, base_of, files, logits, reference, stored
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, BertConfig, BertModel

import ft_ckpt
from ft_ckpt import CheckpointSaver, errors
from ft_ckpt.checkpoint.manifest import read_manifest
from ft_ckpt.storage.places import open_place


class Holder(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


@pytest.fixture
def pair():
    return models.build("policy_and_value").eval()


def test_policy_alone_is_a_hugging_face_folder(pair, tmp_path):
    """The composite saved instead of its policy."""
    report = CheckpointSaver().save(
        pair, tmp_path / "ours", attribute="policy", tokenizer=models.tokenizer()
    )
    assert report.kind == "attribute"
    assert_same_tensors(stored(tmp_path / "ours"), reference(pair.policy, tmp_path / "theirs"))
    assert_agree(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "ours")), logits(pair.policy)
    )


def test_value_head_loads_into_a_module_of_the_caller(pair, tmp_path):
    """The head, its buffer included; the checkpoint has its tensors and no code."""
    CheckpointSaver().save(pair, tmp_path, attribute="value_head")
    assert_same_tensors(stored(tmp_path), pair.value_head.state_dict())
    assert set(files(tmp_path)) == {"ft_ckpt.json", "model.safetensors"}
    head = models.ValueHead()
    states = torch.ones(3, 24)
    assert ft_ckpt.load_model(tmp_path, into=head) is head
    assert torch.equal(head(states), pair.value_head(states))
    assert torch.equal(head.mean, pair.value_head.mean)


def test_a_plain_module_needs_one_of_the_caller(pair, tmp_path):
    """Nothing of the checkpoint names code to run, an old description of modules included."""
    CheckpointSaver().save(pair, tmp_path / "one", attribute="value_head")
    with pytest.raises(
        errors.LoadError, match=r"one: a module of the class ValueHead; .* into=ValueHead\(\.\.\.\)"
    ):
        ft_ckpt.load_model(tmp_path / "one")
    CheckpointSaver().save(pair, tmp_path / "two", attribute=["policy", "value_head"])
    with pytest.raises(
        errors.LoadError, match=r"part 'value_head': .*into=\{'value_head': ValueHead.*with part="
    ):
        ft_ckpt.load_model(tmp_path / "two")
    with pytest.raises(
        errors.LoadError, match=r"two: part 'value_head': a module of .*into=ValueHead"
    ):
        ft_ckpt.load_model(tmp_path / "two", part="value_head")


def test_modules_are_given_by_part(pair, tmp_path):
    """The policy is built, the head is filled."""
    CheckpointSaver().save(pair, tmp_path, attribute=["policy", "value_head"])
    head = models.ValueHead()
    parts = ft_ckpt.load_model(tmp_path, into={"value_head": head})
    assert list(parts) == ["policy", "value_head"]
    assert parts["value_head"] is head
    assert_same_tensors(head.state_dict(), pair.value_head.state_dict())
    assert_agree(logits(parts["policy"]), logits(pair.policy))
    alone = ft_ckpt.load_model(tmp_path, part="value_head", into={"value_head": models.ValueHead()})
    assert_same_tensors(alone["value_head"].state_dict(), head.state_dict())
    with pytest.raises(
        errors.LoadError, match=r"into=: critic: not in .*, which has policy, value_head"
    ):
        ft_ckpt.load_model(tmp_path, into={"critic": head})
    with pytest.raises(
        errors.LoadError, match=r"has the parts policy, value_head.*into=\{'policy': module\}"
    ):
        ft_ckpt.load_model(tmp_path, into=head)
    with pytest.raises(errors.LoadError, match=r"expected a torch\.nn\.Module, or a mapping"):
        ft_ckpt.load_model(tmp_path, into={"value_head": head.state_dict()})


def test_a_module_of_another_shape_is_refused(pair, tmp_path):
    """What does not fit is skipped, and the rest of the module stays random."""
    CheckpointSaver().save(pair, tmp_path, attribute="value_head")
    head = models.ValueHead()
    head.score = nn.Linear(5, 2)
    head.extra = nn.Linear(2, 2)
    before = head.hidden.weight.clone()
    with pytest.raises(
        errors.LoadError, match=r"(?s)score\.weight.*extra\.weight|extra\.weight.*score\.weight"
    ):
        ft_ckpt.load_model(tmp_path, into=head)
    assert torch.equal(head.hidden.weight, before)


def test_nested_attribute(pair, tmp_path):
    holder = Holder(pair)
    CheckpointSaver().save(holder, tmp_path / "one", attribute="model.policy")
    assert_same_tensors(stored(tmp_path / "one"), reference(pair.policy, tmp_path / "theirs"))
    CheckpointSaver().save(holder, tmp_path / "two", attribute=["model.policy", "model.value_head"])
    assert_same_tensors(stored(tmp_path / "two" / "model.policy"), stored(tmp_path / "theirs"))
    parts = ft_ckpt.load_model(tmp_path / "two", into={"model.value_head": models.ValueHead()})
    assert set(parts) == {"model.policy", "model.value_head"}


def test_parts_load_one_by_one(pair, tmp_path):
    CheckpointSaver().save(pair, tmp_path, attribute=["policy", "value_head"])
    assert not [
        name for name in files(tmp_path) if name.endswith(".safetensors") and "/" not in name
    ]
    assert_agree(logits(ft_ckpt.load_model(tmp_path, part="policy")), logits(pair.policy))
    head = models.ValueHead()
    assert ft_ckpt.load_model(tmp_path, part="value_head", into=head) is head
    with pytest.raises(errors.CheckpointError, match=r"critic.*policy"):
        ft_ckpt.load_model(tmp_path, part="critic")


@pytest.mark.parametrize("attribute", ["critic", "policy.critic", ["policy", "critic"]])
def test_unknown_attribute_lists_what_exists(pair, tmp_path, attribute):
    """A filter that matches nothing writes an empty model."""
    with pytest.raises(errors.UnknownAttributeError, match=r"critic.*(policy, value_head|lm_head)"):
        CheckpointSaver().save(pair, tmp_path / "out", attribute=attribute)
    assert not (tmp_path / "out").exists()


def test_shared_trunk_is_recorded_and_shared_again(tmp_path):
    """One trunk under two names."""
    model = models.build("shared_trunk").eval()
    CheckpointSaver().save(model, tmp_path, attribute=["policy", "value_model"])
    shared = {name for group in read_manifest(open_place(tmp_path)).shared for name in group}
    assert {"policy:model.norm.weight", "value_model:trunk.norm.weight"} <= shared
    assert "policy:lm_head.weight" not in shared
    value_model = models.build("shared_trunk").value_model.eval()
    before = dict(value_model.named_parameters())
    parts = ft_ckpt.load_model(tmp_path, into={"value_model": value_model})
    trunk = dict(parts["policy"].model.named_parameters())
    assert all(trunk[name] is tensor for name, tensor in value_model.trunk.named_parameters())
    assert all(before[name] is tensor for name, tensor in value_model.named_parameters()), (
        "an optimizer may hold them"
    )
    ids = models.batch(5)["input_ids"]
    assert_agree(value_model(ids), model.value_model(ids))
    two = {"policy": models.build("qwen3"), "value_model": models.build("shared_trunk").value_model}
    assert ft_ckpt.load_model(tmp_path, into=two) == two
    assert two["policy"].model.norm.weight is not two["value_model"].trunk.norm.weight


def test_what_parts_share_has_the_new_names_of_a_conversion(tmp_path):
    CheckpointSaver().save(
        models.build("shared_trunk"), tmp_path / "old", attribute=["policy", "value_model"]
    )
    ft_ckpt.convert(
        tmp_path / "old", tmp_path / "new", map={"value_model.trunk.*": "value_model.body.*"}
    )
    assert set(stored(tmp_path / "new/policy")) == set(stored(tmp_path / "old/policy"))
    expected = {name.replace("trunk.", "body.") for name in stored(tmp_path / "old/value_model")}
    assert set(stored(tmp_path / "new/value_model")) == expected
    before, after = (read_manifest(open_place(tmp_path / name)).shared for name in ("old", "new"))
    assert (
        after
        == tuple(tuple(name.replace(":trunk.", ":body.") for name in group) for group in before)
        != before
    )
    with pytest.raises(
        errors.SelectionError,
        match=r"policy\.lm_head\.weight -> head\.weight: out of the part policy",
    ):
        ft_ckpt.convert(
            tmp_path / "old", tmp_path / "third", map={"policy.lm_head.weight": "head.weight"}
        )


@pytest.mark.parametrize("name", ["llama-tied", "mixtral", "llava"])
def test_what_is_stored_under_other_names_is_shared_again(name, tmp_path):
    """Fused experts, renamed towers, and heads that are tied in both parts."""
    model = nn.Module()
    model.policy = make(ARCHITECTURES[name])
    model.value, model.trunk = type(model.policy)(model.policy.config), model.policy.model
    model.value.model, model.value.lm_head = model.policy.model, model.policy.lm_head
    CheckpointSaver().save(model, tmp_path, attribute=["policy", "value", "trunk"])
    parts = ft_ckpt.load_model(tmp_path)
    for path in ("policy", "value", "trunk"):
        for found, tensor in model.get_submodule(path).named_parameters(remove_duplicate=False):
            same = next(name for name, one in model.policy.named_parameters() if one is tensor)
            assert parts[path].get_parameter(found) is parts["policy"].get_parameter(same), (
                f"{path}.{found}"
            )


def test_lora_policy_inside_a_composite(tmp_path):
    """The adapter of one attribute, without base, head or prefix."""
    model = models.build("lora_policy_and_value").eval()
    CheckpointSaver().save(model, tmp_path / "ours", adapter_only=True, attribute="policy")
    model.policy.save_pretrained(tmp_path / "theirs")
    assert_same_tensors(stored(tmp_path / "ours"), stored(tmp_path / "theirs"))
    base = base_of(model.policy.state_dict())
    assert_agree(logits(PeftModel.from_pretrained(base, tmp_path / "ours")), logits(model.policy))


def test_whole_composite_is_one_module(pair, tmp_path):
    CheckpointSaver().save(pair, tmp_path)
    loaded = ft_ckpt.load_model(tmp_path, into=models.build("policy_and_value", 7).eval())
    batch = models.batch(5)
    assert_agree(loaded(**batch).loss, pair(**batch).loss)
    assert loaded.policy.lm_head.weight is loaded.policy.model.embed_tokens.weight


class WithHead(nn.Module):
    """As TRL's models with a value head: its own layout, and all that a model of transformers
    shows.
    """

    _keys_to_ignore_on_save = None

    def __init__(self) -> None:
        super().__init__()
        self.inner = models.qwen3()
        self.head = nn.Linear(3, 1)
        models.fill(self)

    @property
    def config(self):
        return self.inner.config

    def save_pretrained(self, folder):
        self.inner.save_pretrained(folder)


def sentences(folder):
    library = pytest.importorskip("sentence_transformers")
    modules = pytest.importorskip("sentence_transformers.models")
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    BertModel(BertConfig(vocab_size=101, **sizes)).save_pretrained(folder)
    models.tokenizer().save_pretrained(folder)
    return library.SentenceTransformer(
        modules=[modules.Transformer(str(folder)), modules.Pooling(16)]
    )


@pytest.mark.parametrize(
    ("make", "inside"),
    [(lambda _: WithHead(), "inner"), pytest.param(sentences, "0.model", marks=pytest.mark.slow)],
)
def test_what_has_a_layout_of_its_own_is_not_saved_in_another(make, inside, tmp_path):
    model = make(tmp_path / "bare")
    with CheckpointSaver(None, tmp_path / "run") as saver:
        with pytest.raises(
            errors.SelectionError, match=rf"save_pretrained.*attribute='{inside}'.*save_state"
        ):
            saver.save(model, tmp_path / "full")
        assert not (tmp_path / "full").exists()
        saver.save(model, tmp_path / "inside", attribute=inside)
        report = saver.save_state(model, tmp_path / "run" / "checkpoint-1")
        assert "plain module" in report.notes[0]
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        saver.resume("must")
    assert_same_tensors(model.state_dict(), before)
    assert stored(tmp_path / "inside").keys() == model.get_submodule(inside).state_dict().keys()


@pytest.mark.parametrize("kind", ["policy_and_value", "lora_policy_and_value"])
def test_a_run_whose_folder_is_the_policy(kind, tmp_path):
    """The policy, or its adapter, where every tool looks for it; the head, and what is frozen, with
    the state.
    """

    def composite():
        pair = models.build(kind)
        pair.reference = nn.Linear(2, 2).requires_grad_(False)
        return pair, torch.optim.SGD([p for p in pair.parameters() if p.requires_grad], lr=0.1)

    def saver():
        return CheckpointSaver(directory=tmp_path, attribute="policy")

    pair, optimizer = composite()
    saver().save_state(pair, tmp_path / "checkpoint-1", optimizer=optimizer)
    folder = tmp_path / "checkpoint-1"
    if kind == "policy_and_value":
        assert_same_tensors(stored(folder), reference(pair.policy, tmp_path / "theirs"))
    else:
        assert (folder / "adapter_model.safetensors").exists()
        assert not (folder / "model.safetensors").exists()
    again, optimizer = composite()
    with torch.no_grad():
        again.value_head.mean.add_(1)
    saver().resume("must", model=again, optimizer=optimizer)
    assert_same_tensors(again.state_dict(), pair.state_dict())
    if kind == "lora_policy_and_value":
        with torch.no_grad():
            again.policy.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight.add_(1)
        with pytest.raises(
            errors.LoadError, match="base: failed: not the base that the adapters were trained on"
        ):
            saver().resume("must", model=again, optimizer=optimizer)
