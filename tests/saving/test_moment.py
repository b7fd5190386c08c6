"""A save in the background is of one moment: what changes after the call returned is not in the
checkpoint.
"""

import json
import threading

import models
import peft
import pytest
import torch
from small_checkpoints import contents

from ft_ckpt import CheckpointSaver, load_model, verify
from ft_ckpt.saving import background


@pytest.fixture
def held(monkeypatch):
    """The thread of a save begins when this is set."""
    go, real = threading.Event(), background.Snapshot.finish_copies

    def finish(self):
        assert go.wait(30)
        return real(self)

    monkeypatch.setattr(background.Snapshot, "finish_copies", finish)
    return go


class Run:
    """A model, its tokenizer, an optimizer, and all that a call of the saver is handed."""

    def __init__(self, kind):
        self.model = models.build("qwen3")
        if kind == "adapters":
            self.model = peft.get_peft_model(
                self.model, peft.LoraConfig(r=2, target_modules=["q_proj"])
            )
            self.model.add_adapter("b", peft.LoraConfig(r=3, target_modules=["k_proj"]))
        self.tokenizer = models.tokenizer()
        self.optimizer = torch.optim.SGD(
            [p for p in self.model.parameters() if p.requires_grad], lr=0.1
        )
        self.given = {
            "metrics": {"loss": 1.0},
            "extra_files": {"notes.txt": bytearray(b"of this moment")},
        }


def a_config(run):
    run.model.config.rms_norm_eps = 0.5


def a_generation_config(run):
    run.model.generation_config.max_length = 77


def more_rows(run):
    run.model.resize_token_embeddings(150)


def more_tokens(run):
    run.tokenizer.add_tokens([f"<new-{number}>" for number in range(30)])


def a_chat_template(run):
    run.tokenizer.chat_template = "{{ other }}"


def a_rate(run):
    run.optimizer.param_groups[0]["lr"] = 9.0


def what_was_handed(run):
    run.given["metrics"]["loss"] = 2.0
    run.given["extra_files"]["notes.txt"][:2] = b"XX"
    run.given["extra_files"]["more.txt"] = b""


def an_adapter_less(run):
    run.model.delete_adapter("b")


def an_adapter_more(run):
    run.model.add_adapter("c", peft.LoraConfig(r=3, target_modules=["k_proj"]))


def an_adapter_config(run):
    run.model.peft_config["b"].lora_alpha = 99
    run.model.peft_config["b"].base_model_name_or_path = "org/other"


CHANGES = {
    "full": [
        a_config,
        a_generation_config,
        more_rows,
        more_tokens,
        a_chat_template,
        a_rate,
        what_was_handed,
    ],
    "adapters": [an_adapter_less, an_adapter_more, an_adapter_config],
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("again", [False, True], ids=["planned", "by the plan before"])
@pytest.mark.parametrize(
    ("kind", "change"), [(kind, change) for kind in CHANGES for change in CHANGES[kind]]
)
def test_a_change_after_the_call_is_not_in_the_checkpoint(kind, change, again, held, tmp_path):
    run = Run(kind)
    state = {"model": run.model, "optimizer": run.optimizer, "adapter_only": False}
    with CheckpointSaver(None, tmp_path, tokenizer=run.tokenizer, on_difference="ignore") as saver:
        if again:
            saver.save_state(path=tmp_path / "before", **state, **run.given)
        saver.save_state(path=tmp_path / "now", **state, **run.given)
        handle = saver.save_state(path=tmp_path / "later", background=True, **state, **run.given)
        change(run)
        held.set()
        handle.result(60)
    assert verify(tmp_path / "later").ok
    now, later = whole(tmp_path / "now"), whole(tmp_path / "later")
    assert now.keys() == later.keys()
    assert [name for name in now if now[name] != later[name]] == []
    load_model(tmp_path / "later")


def whole(folder):
    """All files but for times."""
    found = contents(folder)
    manifest = json.loads(found.pop("ft_ckpt.json"))
    document = found.pop("state/training.json")
    said = {name: manifest[name] for name in ("parts", "metrics", "notes")}
    return {**found, "manifest": said, "state": document[: document.index(b'"history"')]}


@pytest.mark.parametrize("adapter_only", [False, True])
def test_an_adapter_deleted_at_once(adapter_only, held, tmp_path):
    run = Run("adapters")
    with CheckpointSaver(None, tmp_path, background=True) as saver:
        handle = saver.save(run.model, tmp_path / "one", adapter_only=adapter_only)
        run.model.delete_adapter("b")
        held.set()
        assert any(
            part.startswith("adapter") for part in map(str, contents(handle.result(60).path))
        )
    assert verify(tmp_path / "one").ok


def test_what_does_not_fit_is_told_by_the_call(tmp_path):
    run = Run("full")
    run.tokenizer.add_tokens([f"<new-{number}>" for number in range(90)])
    run.tokenizer.add_special_tokens({"eos_token": "<end>"})
    with (
        CheckpointSaver(None, tmp_path, background=True) as saver,
        pytest.raises(ValueError, match="embedding rows"),
    ):
        saver.save(run.model, tmp_path / "one", tokenizer=run.tokenizer)
    assert list(tmp_path.iterdir()) == []
