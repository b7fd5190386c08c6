"""Trainers that write files themselves, and models whose layout decides at the first step what is
saved at the end.
"""

import copy
import json
import shutil
from pathlib import Path

import models
import pytest
import torch
import trainers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from trainers import Recorded, ours, run
from transformers import TrainerCallback

import ft_ckpt
from ft_ckpt.checkpoint.manifest import read_manifest
from ft_ckpt.errors import SelectionError
from ft_ckpt.storage.places import open_place


class FilesOfProject:
    """A mixin without a base, as ms-swift's."""

    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)
        shutil.copy(Path(output_dir).parent / "args.json", output_dir)


class FromMixin(FilesOfProject, Recorded):
    pass


class SavesPretrained(Recorded):
    """Writes what the Trainer would write, without calling it."""

    def _save(self, output_dir=None, state_dict=None):
        self.model.save_pretrained(output_dir, state_dict=state_dict, safe_serialization=True)
        Path(output_dir, "note.txt").write_text("saved by itself")


class SavesStateDict(Recorded):
    def _save(self, output_dir=None, state_dict=None):
        save_file(
            {name: tensor.clone() for name, tensor in self.model.state_dict().items()},
            f"{output_dir}/model.safetensors",
        )


class SavesHalf(Recorded):
    def _save(self, output_dir=None, state_dict=None):
        state = {name: tensor.half() for name, tensor in self.model.state_dict().items()}
        save_file(state, f"{output_dir}/model.safetensors")


class SavesOnBranch(Recorded):
    """A `_save_checkpoint` that calls Trainer's own only sometimes."""

    def _save_checkpoint(self, model, trial):
        if self.state.global_step != 2:
            super()._save_checkpoint(model, trial)


class WithLayout(nn.Module):
    """As TRL's models with a value head: `save_pretrained` of its own."""

    def __init__(self, inner):
        super().__init__()
        self.pretrained_model = inner
        self.head = nn.Linear(24, 1)

    def forward(self, input_ids, labels=None):
        hidden = self.pretrained_model(input_ids, output_hidden_states=True).hidden_states[-1]
        return {"loss": self.head(hidden).square().mean()}

    def save_pretrained(self, folder, **settings):
        self.pretrained_model.save_pretrained(folder, state_dict=self.state_dict(), **settings)


def files_of(folder):
    return {file.path for file in read_manifest(open_place(folder)).files}


def test_files_of_a_mixin_that_are_copied_from_beside_the_target(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "args.json").write_text(json.dumps({"model_type": "tiny"}))
    made = ours(tmp_path / "run", cls=FromMixin, stop_after=2)
    run(made)
    assert json.loads((tmp_path / "run/checkpoint-2/args.json").read_text()) == {
        "model_type": "tiny"
    }
    assert "args.json" in files_of(tmp_path / "run/checkpoint-2")
    (tmp_path / "args.json").write_text("{}")
    made.save_model(str(tmp_path / "final"))
    assert "args.json" in files_of(tmp_path / "final")
    assert sorted(path.name for path in tmp_path.glob("*")) == ["args.json", "final", "run"]


@pytest.mark.sample("SavesPretrained")
@pytest.mark.parametrize("cls", [SavesPretrained, SavesStateDict])
def test_weights_in_the_plain_layout_are_written_once(tmp_path, cls):
    made = ours(tmp_path / "run", cls=cls, stop_after=2)
    run(made)
    live = made.model.state_dict()
    stored = load_file(tmp_path / "run/checkpoint-2/model.safetensors")
    assert all(torch.equal(live[name], tensor) for name, tensor in stored.items())
    assert ("note.txt" in files_of(tmp_path / "run/checkpoint-2")) is (cls is SavesPretrained)
    assert "save_pretrained" not in vars(made.model)
    assert len(run(ours(tmp_path / "run", cls=cls, stop_after=3), True)) == 1


def test_weights_of_other_values_are_refused_before_the_first_step(tmp_path):
    made = ours(tmp_path / "run", cls=SavesHalf)
    with pytest.raises(
        SelectionError, match=r"model\.safetensors: written by SavesHalf\._save itself"
    ):
        made.train()
    assert made.steps == []


def test_a_save_that_does_not_reach_the_trainers_is_named(tmp_path):
    with pytest.warns(
        UserWarning, match=r"SavesOnBranch\._save_checkpoint: step 2 was saved without"
    ):
        run(ours(tmp_path / "run", cls=SavesOnBranch, stop_after=3))
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*")) == [
        "checkpoint-1",
        "checkpoint-3",
    ]


def test_a_model_with_a_layout_of_its_own_is_refused_before_the_first_step(tmp_path):
    made = ours(tmp_path / "run", kind=lambda: WithLayout(models.llama()))
    with pytest.raises(
        SelectionError, match=r"WithLayout: has a layout of its own.*attribute='pretrained_model'"
    ):
        made.train()
    assert made.steps == []


def test_what_is_inside_a_model_with_a_layout_of_its_own(tmp_path):
    """The advice of the refusal, followed: the head is in the state, and the folder is that of the
    model inside.
    """
    shape = {"kind": lambda: WithLayout(models.llama()), "attribute": "pretrained_model"}
    expected = run(
        trainers.trainer(tmp_path / "plain", kind=shape["kind"], save_strategy="no", max_steps=4)
    )
    first = ours(tmp_path / "run", stop_after=2, max_steps=4, **shape)
    seen = run(first)
    first.save_model(str(tmp_path / "final"))
    assert type(ft_ckpt.load_model(tmp_path / "final")).__name__ == "LlamaForCausalLM"
    assert seen + run(ours(tmp_path / "run", max_steps=4, **shape), True) == expected


@pytest.mark.sample("weights alone")
@pytest.mark.parametrize("weights_only", [False, True], ids=["with state", "weights alone"])
def test_adapters_whose_base_cannot_be_made_again(tmp_path, weights_only):
    """PiSSA by a random decomposition: the base that it changed is saved with the adapters, at the
    end too.
    """

    def adapted():
        config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="pissa_niter_4")
        return get_peft_model(models.llama(), config)

    made = ours(tmp_path / "run", kind=adapted, max_steps=1, save_only_model=weights_only)
    made.train()
    made.save_model(str(tmp_path / "final"))
    live = made.model.eval()
    for folder in (tmp_path / "final", tmp_path / "run/checkpoint-1"):
        loaded = ft_ckpt.load_model(folder).eval()
        batch = torch.arange(8)[None]
        assert torch.equal(loaded(batch).logits, live(batch).logits)


class Deleting(TrainerCallback):
    """As LLaMA-Factory's for reward models."""

    def on_save(self, args, state, control, **kwargs):
        Path(args.output_dir, f"checkpoint-{state.global_step}", "model.safetensors").unlink()


def test_a_file_that_is_deleted_after_the_commit_is_named_at_the_next_save(tmp_path):
    made = ours(tmp_path / "run", stop_after=2)
    made.add_callback(Deleting())
    with pytest.warns(
        UserWarning, match=r"checkpoint-1: model\.safetensors: deleted after the save"
    ):
        run(made)


def encoder(kind, bert, folder, steps, stop_after=None):
    """A trainer of sentence_transformers on two modules with weights, or on a loss with weights."""
    library = pytest.importorskip("sentence_transformers")
    from datasets import Dataset

    from ft_ckpt.integrations.trainer import FtCkptCallback

    torch.manual_seed(0)
    callbacks = [FtCkptCallback(on_difference="raise")]
    callbacks += [] if stop_after is None else [trainers.Stop(stop_after)]
    rows = [{"sentence1": f"w{n} w{n + 1}", "sentence2": f"w{2 * n} w{n + 3}"} for n in range(8)]
    settings = {
        **trainers.SILENT,
        "per_device_train_batch_size": 2,
        "max_steps": steps,
        "save_steps": 1,
    }
    if kind == "sentence":
        from sentence_transformers.sentence_transformer.losses import SoftmaxLoss
        from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Transformer

        words = Transformer(str(bert), max_seq_length=16)
        model = library.SentenceTransformer(modules=[words, Pooling(16), Dense(16, 8)])
        loss = SoftmaxLoss(model, 8, num_labels=3)
        args = library.SentenceTransformerTrainingArguments(str(folder), **settings)
        data = Dataset.from_list([{**row, "label": n % 3} for n, row in enumerate(rows)])
        return library.SentenceTransformerTrainer(
            model, args, train_dataset=data, loss=loss, callbacks=callbacks
        )
    if kind == "cross":
        from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss

        model = library.CrossEncoder(str(bert), num_labels=1)
        args = library.CrossEncoderTrainingArguments(str(folder), **settings)
        data = Dataset.from_list([{**row, "label": float(n % 2)} for n, row in enumerate(rows)])
        loss = BinaryCrossEntropyLoss(model)
        return library.CrossEncoderTrainer(
            model, args, train_dataset=data, loss=loss, callbacks=callbacks
        )
    from sentence_transformers.sparse_encoder.losses import (
        SparseMultipleNegativesRankingLoss,
        SpladeLoss,
    )

    model = library.SparseEncoder(str(bert))
    ranking = SparseMultipleNegativesRankingLoss(model)
    loss = SpladeLoss(
        model, loss=ranking, query_regularizer_weight=5e-5, document_regularizer_weight=3e-5
    )
    args = library.SparseEncoderTrainingArguments(str(folder), **settings)
    data = Dataset.from_list(rows)
    return library.SparseEncoderTrainer(
        model, args, train_dataset=data, loss=loss, callbacks=callbacks
    )


def make_bert(folder):
    from transformers import BertConfig, BertForMaskedLM, BertTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(27))]
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    torch.manual_seed(0)
    BertForMaskedLM(BertConfig(vocab_size=32, max_position_embeddings=32, **sizes)).save_pretrained(
        folder
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sentence", "cross", "sparse"])
def test_sentence_transformers(tmp_path, kind):
    """The folder loads with the library, and the run goes on as if it had not been stopped."""
    make_bert(tmp_path / "bert")
    whole = encoder(kind, tmp_path / "bert", tmp_path / "whole", 3)
    whole.train()
    first = encoder(kind, tmp_path / "bert", tmp_path / "run", 3, stop_after=2)
    with pytest.raises(trainers.Stop.Killed):
        first.train()
    again = encoder(kind, tmp_path / "bert", tmp_path / "run", 3)
    again.train(resume_from_checkpoint=True)
    expected = [row["loss"] for row in whole.state.log_history if "loss" in row]
    assert [row["loss"] for row in again.state.log_history if "loss" in row] == expected
    live = copy.deepcopy(again.model.state_dict())
    assert all(torch.equal(tensor, live[name]) for name, tensor in whole.model.state_dict().items())
    again.save_model(str(tmp_path / "final"))
    for folder in (tmp_path / "final", tmp_path / "run" / "checkpoint-3"):
        loaded = type(again.model)(str(folder)).state_dict()
        assert loaded.keys() == live.keys()
        assert all(torch.equal(tensor, live[name]) for name, tensor in loaded.items())
        assert ft_ckpt.verify(folder).ok
