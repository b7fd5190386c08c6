"""transformers' Trainer, and TRL's, save and resume through ft_ckpt."""

import json
import logging
import os
import re
import threading
from pathlib import Path

import models
import pytest
import torch
import torch.distributed as dist
import trainers
from accelerate import ParallelismConfig
from contract_integration import flip_last_bit
from on_ranks import RANK, call_on_ranks, on_ranks
from safetensors.torch import load_file
from torch.utils.data import IterableDataset
from trainers import Recorded, Sentences, Stream, even_llama, ours, run, trainer
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback
from wrappers import cut_over_ranks

import ft_ckpt
from ft_ckpt import Every, Keep, verify
from ft_ckpt.checkpoint.checks import problems
from ft_ckpt.checkpoint.manifest import read_manifest
from ft_ckpt.errors import (
    CheckpointError,
    ConfigError,
    CorruptError,
    SelectionError,
)
from ft_ckpt.integrations import checkpointed as joined_class, trainer_files
from ft_ckpt.integrations.trainer import FtCkptCallback, checkpointed
from ft_ckpt.saver import open_savers
from ft_ckpt.storage.places import open_place

EVALUATED = {"eval_dataset": Sentences(noise=False), "eval_strategy": "steps", "eval_steps": 1}
SHAPES = {
    "shuffled": {},
    "accumulating": {"gradient_accumulation_steps": 3},
    "workers": {"dataloader_num_workers": 2, "train_dataset": Sentences(noise=False)},
    "stream": {"train_dataset": Stream(), "max_steps": 12},
    "evaluated": {**EVALUATED, "eval_on_start": True},
    "plateau": {**EVALUATED, "lr_scheduler_type": "reduce_lr_on_plateau"},
    "lora": {"kind": "lora"},
    "by epoch": {"save_strategy": "epoch", "eval_dataset": Sentences(), "eval_strategy": "epoch"},
}


def names(folder):
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def losses(made):
    return [row["loss"] for row in made.state.log_history if "loss" in row]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_resumed_after_any_step(tmp_path, shape):
    """Other batches, other random numbers, other losses after a resume."""
    expected = run(trainer(tmp_path / "plain", **{**shape, "save_strategy": "no"}))
    whole = ours(tmp_path / "run", **shape)
    assert run(whole) == expected
    steps, accumulate = whole.state.global_step, shape.get("gradient_accumulation_steps", 1)
    by_epoch = shape.get("save_strategy") == "epoch"
    assert names(tmp_path / "run") == sorted(
        f"checkpoint-{n}" for n in ((7, 14) if by_epoch else range(1, steps + 1))
    )
    for stop in (
        (7,)
        if by_epoch
        else (1, 3, 4)
        if accumulate == 3
        else (1, 7, 8)
        if len(shape) < 2
        else (3, 8)
    ):
        given = 7 * (stop // 3) + stop % 3 * 3 if accumulate == 3 else stop
        again = ours(
            tmp_path / "again", seed=0 if "kind" in shape else 1, **{**shape, "save_strategy": "no"}
        )
        assert run(again, tmp_path / "run" / f"checkpoint-{stop}") == expected[given:], stop
        assert losses(again) == losses(whole)


class ByName(trainers.Recorded):
    """Reaches Trainer's method by its name, as DPO and KTO trainers of LLaMA-Factory do."""

    def get_batch_samples(self, *args, **kwargs):
        return Trainer.get_batch_samples(self, *args, **kwargs)


def test_a_trainer_that_reads_batches_without_super_resumes_exactly(tmp_path):
    expected = run(trainer(tmp_path / "plain", cls=ByName, save_strategy="no"))
    seen = run(ours(tmp_path / "run", cls=ByName, save_steps=3, stop_after=4))
    assert seen[:3] + run(ours(tmp_path / "run", cls=ByName, save_strategy="no"), True) == expected


class Reordered(IterableDataset):
    """Seven rows of a stream, in another order in each pass."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(7, generator=torch.Generator().manual_seed(self.epoch))
        for index in order.tolist():
            row = torch.arange(index, index + 8) % models.VOCABULARY
            yield {"input_ids": row, "labels": row.clone()}


@pytest.mark.sample("1")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_later_passes_over_a_stream_keep_their_order(tmp_path, accumulate):
    shape = {"max_steps": 13, "gradient_accumulation_steps": accumulate}
    expected = run(
        trainer(tmp_path / "plain", train_dataset=Reordered(), save_strategy="no", **shape)
    )
    shape["save_steps"] = 3
    first = ours(tmp_path / "run", train_dataset=Reordered(), stop_after=6, **shape)
    second = ours(tmp_path / "run", train_dataset=Reordered(), stop_after=12, **shape)
    third = ours(tmp_path / "run", train_dataset=Reordered(), **shape)
    assert run(first) + run(second, True) + run(third, True) == expected
    epochs = [row["epoch"] for row in third.state.log_history if "loss" in row]
    whole = ours(tmp_path / "whole", train_dataset=Reordered(), **shape)
    run(whole)
    assert epochs == [row["epoch"] for row in whole.state.log_history if "loss" in row]


def test_training_does_not_begin_afresh_where_no_checkpoint_of_ours_is_whole(tmp_path):
    run(ours(tmp_path, stop_after=2))
    for checkpoint in tmp_path.glob("checkpoint-*"):
        flip_last_bit(checkpoint / "state" / "training.safetensors")
    with pytest.raises(CorruptError, match=r"training\.safetensors"):
        run(ours(tmp_path), tmp_path / "checkpoint-2")
    with (
        pytest.warns(UserWarning, match="not whole"),
        pytest.raises(CorruptError, match=r"damaged .see the.*afresh"),
    ):
        run(ours(tmp_path), True)


@pytest.mark.parametrize(
    ("limit", "figures", "kept"),
    [(2, [0.5, 0.1], {2, 14, 99}), (1, [0.1], {1, 14, 99})],
    ids=["two", "one"],
)
def test_the_limit_keeps_the_best_the_last_and_folders_of_others(tmp_path, limit, figures, kept):
    (tmp_path / "checkpoint-99").mkdir()
    metrics = iter([*figures, *[0.7] * 20])
    made = ours(
        tmp_path,
        **EVALUATED,
        save_total_limit=limit,
        load_best_model_at_end=True,
        metric_for_best_model="figure",
        greater_is_better=False,
        compute_metrics=lambda _: {"figure": next(metrics)},
    )
    made.train()
    assert set(names(tmp_path)) == {f"checkpoint-{step}" for step in kept}
    best_folder = tmp_path / f"checkpoint-{len(figures)}"
    assert made.state.best_model_checkpoint == str(best_folder)
    assert made.args.save_total_limit == limit
    best = load_file(best_folder / "model.safetensors")
    live = made.model.state_dict()
    assert all(torch.equal(live[name], tensor) for name, tensor in best.items())


def test_weights_alone_unless_the_state_is_asked_for(tmp_path):
    made = ours(tmp_path, stop_after=2, save_only_model=True)
    run(made)
    assert not (tmp_path / "checkpoint-2" / "state").exists()
    again = ours(tmp_path, stop_after=2, seed=1, save_only_model=True)
    assert run(again, True) == []
    assert again.state.global_step == 2
    assert all(map(torch.equal, made.model.parameters(), again.model.parameters()))
    shape = {"save_only_model": True, "state": True}
    run(ours(tmp_path / "state", stop_after=2, **shape))
    assert len(run(ours(tmp_path / "state", stop_after=3, seed=1, **shape), True)) == 1


def test_what_cannot_work_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="save_strategy"):
        FtCkptCallback(every=Every(steps=3))
    with pytest.raises(ConfigError, match=r"every=.*save_strategy"):
        checkpointed(Trainer, every=5)
    with pytest.raises(ConfigError, match="not a setting"):
        FtCkptCallback(keep_last=3)
    late = trainer(tmp_path)
    late.add_callback(FtCkptCallback())
    with pytest.raises(ConfigError, match=r"call checkpointed\(trainer\)"):
        late.train()
    cls = checkpointed(Recorded)
    assert (cls.__name__, issubclass(cls, Recorded)) == ("Recorded", True)
    existing = trainer(tmp_path)
    assert checkpointed(existing) is existing
    for twice in (trainer(tmp_path, cls=cls), existing):
        with pytest.raises(ConfigError, match="Recorded: saves through ft_ckpt already"):
            checkpointed(twice)


def test_what_is_verified_is_what_is_read(tmp_path, monkeypatch):
    """A checkpoint that is damaged after it was chosen, and the best one, damaged before it is
    loaded.
    """
    run(ours(tmp_path / "run", stop_after=2))
    monkeypatch.setattr(problems, "SMALL_BYTES", 0)  # as if the weights were large

    def damaged_after(*arguments):
        chosen = trainer_files.chosen_by(*arguments)
        flip_last_bit(Path(chosen.path) / "model.safetensors")
        return chosen

    with monkeypatch.context() as patch:
        patch.setattr(joined_class, "chosen_by", damaged_after)
        with pytest.raises(CorruptError, match=r"model\.safetensors"):
            run(ours(tmp_path / "run", stop_after=3), True)
    best = ours(tmp_path / "best", stop_after=1)
    run(best)
    flip_last_bit(tmp_path / "best" / "checkpoint-1" / "model.safetensors")
    best.state.best_model_checkpoint = str(tmp_path / "best" / "checkpoint-1")
    with pytest.raises(CorruptError, match=r"model\.safetensors.*best model"):
        best._load_best_model()


@pytest.mark.sample("auto")
@pytest.mark.parametrize("wanted", [True, "True", "auto", "latest"])
def test_the_first_start_and_the_second_are_one_line(tmp_path, caplog, wanted):
    """A script that is killed is started again as it was: the first time there is nothing to resume
    from.
    """
    caplog.set_level(logging.INFO, "ft_ckpt")
    made = ours(tmp_path / "run", stop_after=1)
    run(made, wanted)
    assert (len(made.steps), caplog.messages[0]) == (
        1,
        f"a fresh start: no whole checkpoint in {tmp_path / 'run'}",
    )
    again = ours(tmp_path / "run", stop_after=2)
    assert len(run(again, wanted)) == 1
    assert run(ours(tmp_path / "run", stop_after=0), "never") == []
    told = [
        line
        for line in caplog.messages
        if line.startswith("resumed checkpoint-1 at step 1, epoch 0, batch 1, saved ")
    ]
    assert len(told) == 1


@pytest.mark.sample("llama")
@pytest.mark.parametrize("kind", ["llama", "lora"])
def test_the_final_model_is_ours(tmp_path, kind):
    """`trainer.save_model`, as every script ends: committed with a manifest, and no pickle beside
    it.
    """
    made = ours(
        tmp_path / "run", kind=kind, max_steps=2, processing_class=trainers.models.tokenizer()
    )
    made.save_model(str(tmp_path / "before"))
    made.train()
    made.save_model(str(tmp_path / "final"))
    made.save_model()  # into the folder of the run, beside its checkpoints
    for folder in (tmp_path / "before", tmp_path / "final", tmp_path / "run"):
        assert ft_ckpt.verify(folder).ok
        assert not list(folder.glob("*.bin"))
        assert (folder / "tokenizer.json").exists()
    assert names(tmp_path / "run") == ["checkpoint-1", "checkpoint-2"]
    weights = "adapter_model.safetensors" if kind == "lora" else "model.safetensors"
    expected = load_file(tmp_path / "run" / "checkpoint-2" / weights)
    saved = load_file(tmp_path / "final" / weights)
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in saved)
    assert read_manifest(open_place(tmp_path / "final")).step == 2


class Projecting(Recorded):
    """As LLaVA's trainer: a further file beside the weights, read again when it goes on."""

    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)
        Path(output_dir, "projector.txt").write_text(f"projector of step {self.state.global_step}")

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self.projector = Path(resume_from_checkpoint, "projector.txt").read_text()


class Tagging(Recorded):
    def save_model(self, output_dir=None, _internal_call=False):
        super().save_model(output_dir, _internal_call)
        Path(output_dir, "tags").mkdir(exist_ok=True)
        Path(output_dir, "tags", "tag.txt").write_text("mine")


class ByItself(Recorded):
    """The whole model in a layout of its own."""

    def _save(self, output_dir=None, state_dict=None):
        torch.save(self.model.state_dict(), Path(output_dir, "pytorch_model.bin"))


class Elsewhere(Recorded):
    def _save_checkpoint(self, model, trial):
        pass


def test_what_a_subclass_adds_is_committed_with_the_checkpoint(tmp_path):
    made = ours(tmp_path / "run", cls=Projecting, stop_after=2)
    run(made)
    assert (tmp_path / "run/checkpoint-2/projector.txt").read_text() == "projector of step 2"
    assert "projector.txt" in {
        file.path for file in read_manifest(open_place(tmp_path / "run/checkpoint-2")).files
    }
    made.save_model(str(tmp_path / "final"))
    assert "projector.txt" in {
        file.path for file in read_manifest(open_place(tmp_path / "final")).files
    }
    again = ours(tmp_path / "run", cls=Projecting, stop_after=3)
    assert len(run(again, True)) == 1
    assert again.projector == "projector of step 2"
    assert not list((tmp_path / "run").rglob("*.bin"))


def test_a_subclass_with_its_own_save_model(tmp_path):
    run(ours(tmp_path, cls=Tagging, stop_after=1))
    files = {file.path for file in read_manifest(open_place(tmp_path / "checkpoint-1")).files}
    assert {"tags/tag.txt", "model.safetensors"} <= files


def test_a_subclass_that_saves_by_itself_is_refused_by_name(tmp_path):
    made = ours(tmp_path, cls=ByItself, max_steps=1)
    with pytest.raises(
        SelectionError, match=r"pytorch_model\.bin: written by ByItself\._save itself"
    ):
        made.train()
    assert made.steps == []
    with pytest.warns(
        UserWarning, match=r"Elsewhere\._save_checkpoint does not call Trainer's own"
    ):
        ours(tmp_path, cls=Elsewhere)


def test_a_run_says_what_it_does(tmp_path, caplog):
    caplog.set_level(logging.INFO, "ft_ckpt")
    ours(tmp_path, max_steps=3, save_total_limit=1).train()
    told = [re.sub(r"[\d.]+ [KM]?B in [\d.]+ s", "SIZE in TIME", line) for line in caplog.messages]
    saves = [f"saved checkpoint-{step}: SIZE in TIME" for step in (1, 2, 3)]
    assert [line for line in told if line.startswith(("saved", "deleted"))] == [
        saves[0],
        *(saves[1], "deleted checkpoint-1"),
        *(saves[2], "deleted checkpoint-2"),
    ]


def test_the_files_of_a_checkpoint(tmp_path):
    made = ours(tmp_path, stop_after=2, processing_class=trainers.models.tokenizer())
    run(made)
    folder = tmp_path / "checkpoint-2"
    report = ft_ckpt.verify(folder)
    assert report.ok, report.problems
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "trainer_state.json",
        "state/training.json",
    } <= files
    state = json.loads((folder / "trainer_state.json").read_text())
    assert (state["global_step"], losses(made)) == (
        2,
        [row["loss"] for row in state["log_history"]],
    )


@pytest.mark.slow
def test_keep_by_what_the_trainer_logged(tmp_path):
    keep = Keep(last=1, best=("figure", "max"), state=Keep(last=1))
    metrics = iter([0.2, 0.3, 0.9, *[0.1] * 20])
    ours(
        tmp_path, keep=keep, compute_metrics=lambda _: {"eval_figure": next(metrics)}, **EVALUATED
    ).train()
    # no checkpoint has a metric of that name: nothing is deleted
    assert set(names(tmp_path)) == {f"checkpoint-{step}" for step in range(1, 15)}
    keep = Keep(last=1, best=("eval_figure", "max"), state=Keep(last=1))
    metrics = iter([0.2, 0.3, 0.9, *[0.1] * 20])
    ours(
        tmp_path / "b", keep=keep, compute_metrics=lambda _: {"figure": next(metrics)}, **EVALUATED
    ).train()
    assert names(tmp_path / "b") == ["checkpoint-14", "checkpoint-3"]
    assert not (tmp_path / "b" / "checkpoint-3" / "state").exists()


def test_a_checkpoint_of_the_trainers_own(tmp_path):
    """It is resumed the Trainer's way, also in the middle of an epoch; what is saved after it is
    resumed ours.
    """
    data = {"train_dataset": Sentences(noise=False)}  # with noise the Trainer's way is not exact
    run(trainer(tmp_path / "theirs", stop_after=4, save_steps=3, **data))
    path = tmp_path / "theirs" / "checkpoint-3"
    assert (path / "optimizer.pt").exists()
    expected = run(trainer(tmp_path / "plain", seed=1, save_strategy="no", **data), path)
    taken = tmp_path / "ours"
    assert run(ours(taken, seed=1, **data), path) == expected
    assert run(ours(tmp_path / "again", seed=1, **data), taken / "checkpoint-6") == expected[3:]
    assert run(ours(tmp_path / "theirs", seed=1, save_strategy="no", **data), True) == expected


def test_callbacks_keep_their_state(tmp_path):
    """Patience is counted over a resume, as the Trainer does on request."""
    metrics = iter([0.1, *[0.7] * 20])
    shape = {
        **EVALUATED,
        "compute_metrics": lambda _: {"figure": next(metrics)},
        "metric_for_best_model": "figure",
        "greater_is_better": False,
        "restore_callback_states_from_checkpoint": True,
    }
    made = ours(tmp_path, stop_after=4, load_best_model_at_end=True, **shape)
    made.add_callback(EarlyStoppingCallback(6))
    run(made)
    again = ours(tmp_path, load_best_model_at_end=True, **shape)
    again.add_callback(EarlyStoppingCallback(6))
    run(again, True)
    assert again.state.global_step == 7
    assert again.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")


def test_a_save_in_the_middle_of_a_step_waits_for_its_end(tmp_path):
    """The Trainer's own checkpoint on SIGTERM asks for one before the optimizer has stepped."""

    class Asked(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            if state.global_step == 2:
                control.should_training_stop = True
                made._save_checkpoint(made.model, None)

    expected = run(trainer(tmp_path / "plain", save_strategy="no", gradient_accumulation_steps=2))
    made = ours(tmp_path / "run", gradient_accumulation_steps=2, save_steps=100)
    made.add_callback(Asked())
    first = run(made)
    assert names(tmp_path / "run") == ["checkpoint-3"]
    assert first + run(ours(tmp_path / "run", gradient_accumulation_steps=2), True) == expected


def test_one_callback_serves_the_trainers_that_a_program_makes(tmp_path):
    """Of a search over hyper-parameters, for example."""
    callback = FtCkptCallback(on_difference="ignore")
    for name in ("first", "second"):
        run(trainer(tmp_path / name, [callback], max_steps=1))
        assert ft_ckpt.latest(tmp_path / name) == tmp_path / name / "checkpoint-1"


def test_writers_are_invited_before_the_first_step(tmp_path):
    def hand_in(resumed):
        with ft_ckpt.Writer(tmp_path / "run", "replay", timeout_seconds=60) as writer:
            part = writer.resume()
            resumed.append(part and part.state)
            writer.provide(lambda: {"samples": 3})
            writer.wait(60)

    resumed = []
    for steps in (1, 2):
        made = ours(
            tmp_path / "run", max_steps=steps, on_resumed=lambda saver: saver.invite("replay")
        )
        replay = threading.Thread(target=hand_in, args=(resumed,))
        replay.start()
        run(made, steps == 2)
        made.callback_handler.callbacks.clear()
        part = tmp_path / f"run/checkpoint-{steps}/state/writers/replay/state.safetensors"
        assert ft_ckpt.load(part) == {"samples": 3}
        for saver in open_savers():
            saver.close()
        replay.join(60)
    assert resumed == [None, {"samples": 3}]


on_two = on_ranks(2, group_seconds=None, timeout=280)  # the Trainer makes the group
SHARDED = {
    "fsdp": "full_shard",
    "fsdp_config": {"version": 2, "fsdp_version": 2, "state_dict_type": "SHARDED_STATE_DICT"},
}
MESHES = {
    "mesh_rows": {"fsdp_size": 2},
    "mesh_tensor": {"tp_size": 2},
    "mesh_tensor_fsdp": {"tp_size": 2, "fsdp_size": 2},
    "mesh_hybrid": {"fsdp_size": 2, "dp_replicate_size": 2},
}


def shape_of(kind):
    """Settings of a Trainer whose model is under DDP, "fsdp2", or on a mesh over which transformers
    cuts it.
    """
    own = SHARDED if kind == "fsdp2" else {"kind": kind}
    if kind in MESHES:  # the Trainer accepts such a model only with this setting
        own = {
            "kind": lambda: cut_over_ranks(even_llama(), **MESHES[kind]),
            "save_only_model": True,
        }
    return {"train_dataset": Sentences(noise=False), **own}


def of_rank_0(folder):
    """Rank 0's path of the folder."""
    told = [str(folder.resolve())]
    dist.broadcast_object_list(told)
    return Path(told[0])


def exact(folder, kind):
    shape, told = shape_of(kind), {"state": kind in MESHES}
    expected = run(trainer(folder / "plain", **shape, save_strategy="no"))
    first = run(ours(folder / "run", **shape, **told, stop_after=3))
    assert first == expected[:3]
    again = run(ours(folder / "run", **shape, **told, seed=0 if kind == "lora" else 1), True)
    assert first + again == expected, (first, again, expected)
    assert verify(of_rank_0(folder) / "run" / f"checkpoint-{len(expected)}").ok


def far(folder, kind):
    """A disk for each rank: only rank 0 has the checkpoints, and all resume, and load the best
    model.
    """
    private = folder / f"disk-{RANK}"
    private.mkdir()
    home = Path.cwd()
    os.chdir(private)
    try:
        exact(Path("/proc/self/cwd"), kind)
        best(Path("/proc/self/cwd/best"), kind)
        assert not RANK or not list(private.rglob("checkpoint-*"))
    finally:
        os.chdir(home)


def final(folder, kind):
    """`save_model` as the Trainer has it: of a sharded model on all ranks, else the main process
    alone may call it.
    """
    made = ours(folder / "run", **shape_of(kind), max_steps=2, save_strategy="no")
    run(made)
    if kind == "fsdp2" or made.is_world_process_zero():
        made.save_model(str(folder / "final"))
    made.save_model(str(folder / "again"))  # as most scripts do
    dist.barrier()
    for name in ("final", "again"):
        assert verify(folder / name).ok
    saved, live = load_file(folder / "final" / "model.safetensors"), made.model.state_dict()
    whole = {
        name: getattr(live[name], "full_tensor", lambda name=name: live[name])() for name in saved
    }
    assert all(torch.equal(whole[name], tensor) for name, tensor in saved.items())


def best(folder, kind):
    """The best model comes back on every rank, and the limit is kept."""
    metrics = iter([0.5, 0.1, *[0.7] * 20])
    made = ours(
        folder,
        **shape_of(kind),
        state=kind in MESHES,
        compute_metrics=lambda _: {"figure": next(metrics)},
        metric_for_best_model="figure",
        greater_is_better=False,
        load_best_model_at_end=True,
        save_total_limit=2,
        **EVALUATED,
    )
    made.train()
    assert made.state.best_global_step == 2
    folder = of_rank_0(folder)
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == [
        "checkpoint-2",
        "checkpoint-8",
    ]
    saved, live = load_file(folder / "checkpoint-2" / "model.safetensors"), made.model.state_dict()
    whole = {
        name: getattr(live[name], "full_tensor", lambda name=name: live[name])() for name in saved
    }
    assert all(torch.equal(whole[name], tensor) for name, tensor in saved.items())


@pytest.mark.slow
@on_two
def test_all_ranks_learn_that_there_is_nothing_to_resume(tmp_path):
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        ours(tmp_path).train(resume_from_checkpoint="must")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "fsdp2"])
@on_two
def test_two_ranks_go_on_to_the_bit(tmp_path, kind):
    exact(tmp_path, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "fsdp2"])
@pytest.mark.parametrize("way", [best, far, final])
@on_two
def test_two_ranks_in_other_ways(tmp_path, way, kind):
    way(tmp_path, kind)


def test_two_ranks(tmp_path):
    call_on_ranks(2, exact, tmp_path, "llama", group_seconds=None, timeout=280)
    # One rank goes on with the samples that the two had not seen.
    shape = {
        "train_dataset": Sentences(noise=False),
        "per_device_train_batch_size": 4,
        "save_strategy": "no",
    }
    expected = run(trainer(tmp_path / "alone", **shape))
    found = run(ours(tmp_path / "one", **shape), tmp_path / "run" / "checkpoint-3")
    assert [batch for batch, _ in found] == [batch for batch, _ in expected[3:]]


def on_mesh(folder, way, kind):
    # Accelerate refuses this mesh on CPUs, by the name of the device alone.
    ParallelismConfig._validate_accelerator = lambda self, accelerator: None
    way(folder, kind)


@pytest.mark.slow
def test_models_that_transformers_has_cut(tmp_path):
    """One process goes on with the samples that two ranks of one share have left."""
    call_on_ranks(2, on_mesh, tmp_path, exact, "mesh_tensor", launch="mesh", timeout=280)
    shape = {"train_dataset": Sentences(noise=False), "kind": even_llama, "save_strategy": "no"}
    expected = run(trainer(tmp_path / "alone", **shape))
    found = run(ours(tmp_path / "one", **shape), tmp_path / "run" / "checkpoint-3")
    assert [batch for batch, _ in found] == [batch for batch, _ in expected[3:]]


CUT_TWICE = [
    (2, exact, "mesh_rows"),
    (2, best, "mesh_rows"),
    (4, exact, "mesh_tensor_fsdp"),
    (4, best, "mesh_tensor_fsdp"),
    (4, exact, "mesh_hybrid"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "way", "kind"), CUT_TWICE)
def test_models_that_transformers_has_cut_twice(tmp_path, ranks, way, kind):
    call_on_ranks(ranks, on_mesh, tmp_path, way, kind, launch="mesh", timeout=280)
