"""What is committed is what `from_pretrained` makes of the folder: its config describes the
weights, or it is said.
"""

import copy
import random
import sys
from pathlib import Path

import models
import numpy as np
import pytest
import torch
import transformers
from architectures import ARCHITECTURES, make
from compare import raw
from peft import LoraConfig, get_peft_model
from torch import nn

import ft_ckpt
from ft_ckpt import CheckpointSaver
from ft_ckpt.errors import CompanionError


def another_head(model) -> None:
    model.lm_head = nn.Linear(24, 7)


def deeper_head(model) -> None:
    model.lm_head = nn.Sequential(nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 101))


def fewer_layers(model) -> None:
    del model.model.layers[1]


def layers_twice(model) -> None:
    model.model.layers.extend(copy.deepcopy(list(model.model.layers)))


def wider(model) -> None:
    model.model.layers[0].mlp.up_proj = nn.Linear(24, 44, bias=False)


def with_bias(model) -> None:
    model.model.layers[1].self_attn.q_proj = nn.Linear(24, 24)


def with_buffer(model) -> None:
    model.register_buffer("seen", torch.zeros(2))


def without_norm(model) -> None:
    model.model.norm = nn.Identity()


EDITS = {
    another_head: r"lm_head\.weight: \(7, 24\) in the model, \(101, 24\) in that of its config",
    deeper_head: r"lm_head\.0\.weight: in the model, not in that of its config",
    fewer_layers: r"model\.layers\.1\.self_attn\.q_proj\.weight: not in the model, in that of",
    layers_twice: r"model\.layers\.2\.self_attn\.q_proj\.weight: in the model, not in that of",
    wider: r"model\.layers\.0\.mlp\.up_proj\.weight: \(44, 24\) in the model, \(36, 24\) in that",
    with_bias: r"model\.layers\.1\.self_attn\.q_proj\.bias: in the model, not in",
    with_buffer: r"seen: in the model, not in",
    without_norm: r"model\.norm\.weight: not in the model, in",
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_model_that_its_config_does_not_describe_is_refused(edit, tmp_path: Path) -> None:
    """from_pretrained would fail, drop the new tensors or draw the missing ones at random."""
    model = models.llama(tie_word_embeddings=False)
    edit(model)
    with CheckpointSaver() as saver, pytest.raises(CompanionError, match=EDITS[edit]):
        saver.save(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("edit", [fewer_layers, layers_twice])
def test_an_edit_that_the_config_describes_is_saved(edit, tmp_path: Path) -> None:
    model = models.llama()
    edit(model)
    model.config.num_hidden_layers = len(model.model.layers)
    with CheckpointSaver() as saver:
        assert saver.save(model, tmp_path / "out").notes == ()
    assert_loads_equal(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out"), model)


def assert_loads_equal(loaded: nn.Module, model: nn.Module) -> None:
    wanted = {name: raw(tensor) for name, tensor in model.state_dict().items()}
    assert {name: raw(tensor) for name, tensor in loaded.state_dict().items()} == wanted


def test_a_run_saves_what_only_its_own_script_can_load(tmp_path: Path) -> None:
    """A resume restores into the script's model, whatever its config says."""
    model = models.llama()
    with_bias(model)
    with (
        CheckpointSaver(directory=tmp_path) as saver,
        pytest.warns(UserWarning, match="save\\(\\) refuses this model"),
    ):
        report = saver.save_state(model)
    assert [note for note in report.notes if "from_pretrained cannot load this checkpoint" in note]
    resumed = models.llama()
    with_bias(resumed)
    with CheckpointSaver(directory=tmp_path) as saver:
        saver.resume("must", model=resumed)
    assert_loads_equal(resumed, model)


def test_a_background_save_fails_before_its_commit(tmp_path: Path) -> None:
    model = models.llama()
    with_bias(model)
    with CheckpointSaver(background=True) as saver:
        pending = saver.save(model, tmp_path / "out")
        with pytest.raises(CompanionError, match=r"q_proj\.bias"):
            pending.result()
        with pytest.raises(CompanionError, match=r"q_proj\.bias"):
            saver.wait()
    assert not (tmp_path / "out").exists()


def test_a_nested_config_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """save_pretrained checks the outer config only."""
    text = {
        "model_type": "qwen3",
        "head_dim": 8,
        "hidden_size": 32,
        "vocab_size": 101,
        "num_hidden_layers": 4,
    }
    text |= {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    vision = ARCHITECTURES["llava"].settings["vision_config"]
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=100)
    model = transformers.LlavaForConditionalGeneration(config)
    del model.model.language_model.layers[3]
    model.config.text_config.num_hidden_layers = 3
    with (
        CheckpointSaver() as saver,
        pytest.raises(CompanionError, match=r"config\.json: .*cannot read it.*layer_types"),
    ):
        saver.save(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    model.config.text_config.layer_types = model.config.text_config.layer_types[:3]
    with CheckpointSaver() as saver:
        saver.save(model, tmp_path / "out")
    assert_loads_equal(
        transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path / "out"), model
    )


class WithValueHead(transformers.LlamaForCausalLM):
    """A script's class with a head that no config describes."""

    def __init__(self, config):
        super().__init__(config)
        self.value_head = nn.Linear(config.hidden_size, 1)


class Renamed(transformers.LlamaForCausalLM):
    """A script's class with other code and the same tensors."""


@pytest.mark.parametrize(
    ("cls", "loss"),
    [
        (
            WithValueHead,
            (
                "differs in value_head.weight: in the model, not in that of its config; "
                "value_head.bias"
            ),
        ),
        (Renamed, "without the code of its own"),
    ],
)
def test_a_class_of_the_script_is_saved_with_the_way_to_load_it(cls, loss, tmp_path: Path) -> None:
    model = cls(models.llama().config)
    with CheckpointSaver() as saver:
        report = saver.save(model, tmp_path / "out")
    (note,) = [note for note in report.notes if note.startswith(f"{cls.__name__}: ")]
    assert "load_model(folder, into=model)" in note
    assert f"as LlamaForCausalLM, {'which ' if 'differs' in loss else ''}{loss}" in note
    loaded = ft_ckpt.load_model(tmp_path / "out", into=cls(models.llama().config))
    assert_loads_equal(loaded, model)


def test_an_argument_of_the_class_is_named(tmp_path: Path) -> None:
    """No field of the config says that the model has no pooler."""
    sizes = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.BertModel(
        transformers.BertConfig(**sizes, intermediate_size=16), add_pooling_layer=False
    )
    with CheckpointSaver() as saver:
        (note,) = saver.save(model, tmp_path / "out").notes
    assert "from_pretrained(..., add_pooling_layer=False)" in note
    loaded, info = transformers.BertModel.from_pretrained(
        tmp_path / "out", add_pooling_layer=False, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert_loads_equal(loaded, model)


def test_parts_of_a_module_are_compared_one_by_one(tmp_path: Path) -> None:
    module = models.PolicyAndValue(models.llama())
    with CheckpointSaver() as saver:
        assert (
            saver.save(module, tmp_path / "first", attribute=["policy", "value_head"]).notes == ()
        )
    fewer_layers(module.policy)
    with CheckpointSaver() as saver, pytest.raises(CompanionError, match=r"model\.layers\.1"):
        saver.save(module, tmp_path / "second", attribute=["policy", "value_head"])


@pytest.mark.parametrize("how", [{"adapter_only": False}, {"merged": True}])
def test_the_base_of_adapters_is_compared(how, tmp_path: Path) -> None:
    base = models.llama(tie_word_embeddings=False)
    adapted = LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"
    )
    with CheckpointSaver() as saver:
        notes = saver.save(
            get_peft_model(copy.deepcopy(base), adapted), tmp_path / "first", **how
        ).notes
        assert not [note for note in notes if "config" in note]
        wider(base)
        with pytest.raises(CompanionError, match=r"mlp\.up_proj\.weight: \(44, 24\) in the model"):
            saver.save(get_peft_model(base, adapted), tmp_path / "second", **how)


def test_the_model_of_the_config_is_made_once(tmp_path: Path, monkeypatch) -> None:
    read = []
    from_pretrained = transformers.LlamaConfig.from_pretrained

    def count(*given, **more):
        read.append(given)
        return from_pretrained(*given, **more)

    model = models.llama(rope_theta=12345.0)
    monkeypatch.setattr(transformers.LlamaConfig, "from_pretrained", count)
    with CheckpointSaver() as saver:
        for number in range(3):
            saver.save(model, tmp_path / str(number))
        assert len(read) == 1
        layers_twice(model)
        model.config.num_hidden_layers = 4
        saver.save(model, tmp_path / "other")
    assert len(read) == 2


def state_of_the_process() -> tuple:
    """What the code of a training step reads, in any thread."""
    functions = (
        torch.linspace,
        nn.Module.register_parameter,
        nn.Module.state_dict,
        nn.init.normal_,
    )
    tie = transformers.PreTrainedModel.tie_weights
    return torch.get_default_dtype(), torch.empty(0).device, functions, tie


def random_numbers() -> tuple:
    return raw(torch.get_rng_state()), random.getstate(), np.random.get_state()[1].tobytes()


def test_training_notices_nothing_of_the_comparison(tmp_path: Path) -> None:
    """Of a composite model in bfloat16, for whose parts transformers sets the default dtype of the
    process.
    """
    model = make(ARCHITECTURES["llava"]).bfloat16()
    model.config.text_config.num_hidden_layers = 60
    model.config.text_config.dtype = torch.bfloat16  # as after from_pretrained
    layers = model.model.language_model.layers
    layers.extend(copy.deepcopy(layers[0]) for _ in range(58))
    for number, layer in enumerate(layers):
        layer.self_attn.layer_idx = number
    before, numbers, interval = state_of_the_process(), random_numbers(), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    seen = set()
    try:
        with CheckpointSaver(background=True) as saver:
            pending = saver.save(model, tmp_path / "out")
            while not pending.done:
                seen.add(state_of_the_process())
            assert pending.result().notes == ()
    finally:
        sys.setswitchinterval(interval)
    assert seen == {before}
    assert random_numbers() == numbers


@pytest.mark.parametrize("name", ["diffllama", "sew"])
def test_the_comparison_draws_no_numbers_of_the_training(name, tmp_path: Path) -> None:
    """These classes draw numbers on the host when they are made, on the meta device too."""
    if name == "sew":
        sizes = {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
        }
        convolutions = {"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3)}
        model = transformers.SEWModel(
            transformers.SEWConfig(**sizes, **convolutions, squeeze_factor=2)
        )
    else:
        model = transformers.DiffLlamaForCausalLM(transformers.DiffLlamaConfig(**models.SIZES))
    numbers = random_numbers()
    with CheckpointSaver() as saver:
        assert saver.save(model, tmp_path / "out").notes == ()
    assert random_numbers() == numbers
