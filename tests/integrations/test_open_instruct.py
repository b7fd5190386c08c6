"""The functions open-instruct's scripts call, by their names and with their results."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import models
import pytest
import torch
import transformers
from accelerate import Accelerator
from compare import assert_same_tensors, reference, stored
from torch import nn
from transformers import AutoTokenizer, GenerationConfig, LlamaForCausalLM

from ft_ckpt import verify
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME
from ft_ckpt.errors import UnknownAttributeError
from ft_ckpt.integrations.open_instruct import (
    clean_last_n_checkpoints,
    get_last_checkpoint,
    save_with_accelerate,
)

# An entry is a folder; "name!" is one with open-instruct's marker, "name*" one with our manifest,
# "name." a file. layout, the newest complete one, the newest of all
LAST = [
    ("", None, None),
    ("step_1! step_10! step_9!", "step_10", "step_10"),
    ("step_1! step_10", "step_1", "step_10"),
    ("step_2* step_1!", "step_2", "step_2"),
    ("step_1 step_2", None, "step_2"),
    ("epoch_0! epoch_1!", "epoch_1", "epoch_1"),
    ("step_5! epoch_7!", "step_5", "step_5"),
    ("step_5 epoch_7!", None, "step_5"),
    ("step_notes. epoch_7!", None, None),
    ("checkpoint-30! final! steps_3! Step_4!", None, None),
    ("step_2! step_final! step_", "step_2", "step_2"),
    ("step_7. step_3!", "step_3", "step_7"),
    ("step_007! step_6!", "step_007", "step_007"),
    ("epoch_1_step_30! epoch_2_step_4!", "epoch_1_step_30", "epoch_1_step_30"),
]

# layout, how many to keep, what is left
CLEAN = [
    ("step_1! step_2! step_10!", 2, "step_2 step_10"),
    ("step_1! step_2! step_10!", 0, ""),
    ("step_1! step_2! step_10!", -1, "step_1 step_2 step_10"),
    ("step_1! step_2! step_10!", 5, "step_1 step_2 step_10"),
    ("step_1* step_2 step_3!", 1, "step_3"),
    ("step_3! step_4 step_5", 2, "step_4 step_5"),
    ("epoch_0! epoch_1! step_50!", 1, "step_50"),
    (
        "step_1! step_2! step_99. checkpoint-7! notes best_3!",
        1,
        "step_2 step_99 checkpoint-7 notes best_3",
    ),
    ("step_1! step_final! step_2!", 1, "step_final step_2"),
    ("", 3, ""),
]


def lay_out(folder: Path, layout: str) -> Path:
    for entry in layout.split():
        path = folder / entry.rstrip("!*.")
        if entry.endswith("."):
            path.write_text("")
            continue
        path.mkdir()
        (path / "model.safetensors").write_text("weights")
        for mark, name in (("!", "COMPLETED"), ("*", MANIFEST_NAME)):
            if entry.endswith(mark):
                (path / name).write_text("")
    return folder


@pytest.mark.parametrize(("layout", "complete", "any_state"), LAST)
def test_last_checkpoint(
    layout: str, complete: str | None, any_state: str | None, tmp_path: Path
) -> None:
    folder = str(lay_out(tmp_path, layout))
    assert get_last_checkpoint(folder) == (complete and f"{folder}/{complete}")
    assert get_last_checkpoint(folder, incomplete=True) == (any_state and f"{folder}/{any_state}")


def test_path_is_spelt_as_the_folder_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay_out(tmp_path, "step_1!")
    monkeypatch.chdir(tmp_path)
    assert get_last_checkpoint("./") == "./step_1"


@pytest.mark.parametrize(
    "function", [get_last_checkpoint, lambda folder: clean_last_n_checkpoints(folder, 1)]
)
def test_folder_that_is_not_there(function, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        function(str(tmp_path / "nowhere"))


@pytest.mark.parametrize(("layout", "keep", "left"), CLEAN)
def test_clean_last_n(layout: str, keep: int, left: str, tmp_path: Path) -> None:
    clean_last_n_checkpoints(str(lay_out(tmp_path, layout)), keep)
    assert {path.name for path in tmp_path.iterdir()} == set(left.split())


def test_interrupted_cleaning_leaves_nothing_that_looks_whole(tmp_path: Path, monkeypatch) -> None:
    """Both marks go before the weights do."""
    lay_out(tmp_path, "step_1! step_2* step_3!")

    def killed(path: Path, **_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ft_ckpt.storage.local_disk.rmtree", killed)
    for name in ("step_1", "step_2"):
        with pytest.raises(KeyboardInterrupt):
            clean_last_n_checkpoints(str(tmp_path), 1)
        assert [path.name for path in (tmp_path / name).iterdir()] == ["model.safetensors"]
        (tmp_path / name / "model.safetensors").unlink()
        (tmp_path / name).rmdir()
    assert get_last_checkpoint(str(tmp_path)) == f"{tmp_path}/step_3"


def test_linked_checkpoint_is_not_followed(tmp_path: Path) -> None:
    elsewhere = lay_out(tmp_path, "kept") / "kept"
    (elsewhere / "COMPLETED").write_text("")
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / "step_1").symlink_to(elsewhere)
    clean_last_n_checkpoints(str(runs), 0)
    assert {path.name for path in elsewhere.iterdir()} == {"model.safetensors", "COMPLETED"}


def test_finding_and_cleaning_bring_no_torch(tmp_path: Path) -> None:
    lay_out(tmp_path, "step_1! step_2!")
    code = (
        "import sys; from ft_ckpt.integrations.open_instruct import *\n"
        "clean_last_n_checkpoints(sys.argv[1], 1); print(get_last_checkpoint(sys.argv[1]), 'torch' "
        "in sys.modules)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, tmp_path],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert out.stdout.split() == [f"{tmp_path}/step_2", "False"]


# Saving


@pytest.fixture
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def saved(accelerator: Accelerator, model: nn.Module, folder: Path, **options: object) -> Path:
    """What `save_with_accelerate` makes of a prepared model; the live generation configs are
    checked on the way.
    """
    holders = [m for m in model.modules() if getattr(m, "generation_config", None) is not None]
    before = [copy.deepcopy(vars(m.generation_config)) for m in holders]
    save_with_accelerate(
        accelerator, accelerator.prepare(model), models.tokenizer(), str(folder), **options
    )
    assert [vars(m.generation_config) for m in holders] == before
    assert verify(folder).ok
    assert AutoTokenizer.from_pretrained(folder).chat_template == models.CHAT_TEMPLATE
    return folder


def equal(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


@pytest.mark.parametrize(("template", "eos"), [("olmo_thinker", [5, 6]), ("tulu", 1), (None, 1)])
def test_stop_tokens_follow_the_template(
    template, eos, accelerator: Accelerator, tmp_path: Path
) -> None:
    model = models.build("llama")
    model.generation_config.eos_token_id = 9
    folder = saved(accelerator, model, tmp_path / "out", chat_template_name=template)
    assert GenerationConfig.from_pretrained(folder).eos_token_id == eos


@pytest.mark.parametrize("attribute", ["policy", None])
@pytest.mark.parametrize("generation", [GenerationConfig(), {"eos_token_id": 1}])
def test_a_wrapper_that_was_given_a_generation_config(
    generation, attribute, accelerator, tmp_path: Path
) -> None:
    """As open-instruct's own function leaves PPO's policy and value behind."""
    model = models.build("policy_and_value")
    model.generation_config = generation
    save_with_accelerate(
        accelerator,
        accelerator.prepare(model),
        models.tokenizer(),
        str(tmp_path / "out"),
        model_attribute_to_save=attribute,
    )
    assert model.generation_config is generation
    assert verify(tmp_path / "out").ok
    if attribute is not None:
        assert equal(LlamaForCausalLM.from_pretrained(tmp_path / "out"), model.policy)
        assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == 1


# What open-instruct's own function, run beside ours, was seen to write: model, options, settings of
# generation, files
STOP, OLMO = {"eos_token_id": 1, "bos_token_id": 0}, {"eos_token_id": [5, 6]}
TOKENIZER = {"chat_template.jinja", "tokenizer.json", "tokenizer_config.json"}
MODEL, ADAPTER = (
    {"config.json", "model.safetensors"},
    {"README.md", "adapter_config.json", "adapter_model.safetensors"},
)
THEIRS = {
    "tied": ("llama", {}, STOP, MODEL),
    "untied": ("qwen3", {}, STOP, MODEL),
    "experts": ("mixtral", {}, STOP, MODEL),
    "template of olmo": ("olmo2", {"chat_template_name": "olmo_thinker"}, OLMO, MODEL),
    "no template": ("gpt2", {"chat_template_name": None}, STOP, MODEL),
    "adapter": (
        "lora",
        {"use_lora": True},
        None,
        ADAPTER | {f"second/{name}" for name in (*ADAPTER, *TOKENIZER)},
    ),
    "policy": ("policy_and_value", {"model_attribute_to_save": "policy"}, STOP, MODEL),
    "cannot generate": ("trunk", {}, None, MODEL),
}


@pytest.mark.parametrize("case", THEIRS)
def test_files_are_those_of_open_instruct(case, accelerator: Accelerator, tmp_path: Path) -> None:
    """But for our manifest, and the tokenizer beside a second adapter too.

    Of a policy theirs keeps the settings of generation it has, since it sets those of the template
    on the wrapper.
    """
    name, options, settings, files = THEIRS[case]
    model = models.build("qwen3").model if name == "trunk" else models.build(name)
    folder = saved(accelerator, model, tmp_path / "out", **options)
    files = (
        files | TOKENIZER | {MANIFEST_NAME} | ({"generation_config.json"} if settings else set())
    )
    assert {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()} == files
    if settings:
        written = json.loads((folder / "generation_config.json").read_text())
        assert written == {**settings, "transformers_version": transformers.__version__}
    whole = getattr(model, options.get("model_attribute_to_save", ""), model)
    assert_same_tensors(stored(folder), reference(whole, tmp_path / "theirs"))


def test_attribute_that_is_not_there(accelerator: Accelerator, tmp_path: Path) -> None:
    with pytest.raises(UnknownAttributeError, match="critic"):
        saved(
            accelerator,
            models.build("policy_and_value"),
            tmp_path / "out",
            model_attribute_to_save="critic",
        )
    assert not (tmp_path / "out").exists()
