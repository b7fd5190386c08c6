"""What a resumed run is: the same batches, losses and random numbers as one that was never
interrupted.
"""

import json
import pickle
import shutil
import warnings
from itertools import chain

import models
import pytest
import torch
from methods import UNMERGEABLE, with_adapter
from small_checkpoints import rewrite_manifest
from torch import nn
from training import QUIET, begin, go_on, network, prepared, train, whole

import ft_ckpt
from ft_ckpt import CheckpointSaver, Every, Keep, latest
from ft_ckpt.checkpoint import opening
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME, stored_manifest
from ft_ckpt.errors import (
    ConfigError,
    CorruptError,
    LoadError,
    ManifestError,
    NotACheckpointError,
    SelectionError,
    UnreadableError,
)
from ft_ckpt.runs.resume import opening as resume_opening
from ft_ckpt.storage.local import LocalStore

SHAPES = {
    "shuffled": {},
    "accumulating": {"accumulate": 4},
    "stream": {"stream": True},
    "stream, accumulating": {"stream": True, "accumulate": 3},
}


@pytest.mark.sample("accumulating-stops0")
@pytest.mark.parametrize(
    "stops", [(1, 5, 6, 7, 12, 16), pytest.param(range(1, 19), marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_stopped_after_any_batch(tmp_path, shape, stops):
    """Other batches, other random numbers, other losses after a resume."""
    expected = whole(tmp_path / "whole", **shape)
    batches = sum(1 for first, _ in expected if isinstance(first, float))
    assert batches == 18
    for stop in stops:
        folder = tmp_path / str(stop)
        assert begin(folder, stop, **shape) + go_on(folder, **shape) == expected, stop
        shutil.rmtree(folder)


WORKERS = {"shuffled": {}, "stream": {"stream": True}, "noise in workers": {"noisy": True}}


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape", [{"workers": 2, **shape} for shape in WORKERS.values()], ids=WORKERS
)
def test_with_loader_workers(tmp_path, shape):
    expected = whole(tmp_path / "whole", **shape)
    for stop in (3, 6, 8):
        assert (
            begin(tmp_path / str(stop), stop, **shape) + go_on(tmp_path / str(stop), **shape)
            == expected
        )


def test_resumed_twice(tmp_path):
    """The second resume begins the data anew."""
    for first, second in ((2, 2), (5, 1), (6, 3), (7, 9)):
        folder = tmp_path / f"{first} {second}"
        parts = begin(folder, first), go_on(folder, second), go_on(folder)
        assert [*chain(*parts)] == whole(tmp_path / "whole")


def test_every_item_is_reported(tmp_path):
    begin(tmp_path, 4)
    run = prepared()
    report = CheckpointSaver(run.accelerator, tmp_path).resume().report
    assert {item.name: item.status for item in report.items} == dict.fromkeys(
        ["weights", "optimizer", "scheduler", "data", "rng"], "restored"
    )
    assert report.differences == ()


def test_the_report_names_what_changed_in_the_run(tmp_path):
    """The batch size or the accumulation was another one, silently."""
    begin(tmp_path, 4, accumulate=2)
    run = prepared(accumulate=4)
    with pytest.warns(UserWarning, match="gradient accumulation: 2 when it was saved, 4 now"):
        report = CheckpointSaver(run.accelerator, tmp_path).resume().report
    assert report.differences == ("gradient accumulation: 2 when it was saved, 4 now",)
    with pytest.raises(LoadError, match="gradient accumulation"):
        CheckpointSaver(run.accelerator, tmp_path, on_difference="raise").resume()


@pytest.mark.parametrize("few", [True, False])
def test_the_report_names_what_was_trained_and_is_frozen(tmp_path, few):
    """A script that froze or unfroze layers at one step does not do so behind it."""
    names = (
        ["0.weight", "3.bias"] if few else ["0.weight", "0.bias", "1.weight", "3.weight", "3.bias"]
    )

    def frozen(model):
        for name in names:
            model.get_parameter(name).requires_grad_(False)
        return model

    begin(tmp_path / "trained", 4)
    begin(tmp_path / "frozen", 4, wrap=frozen)

    def differences(folder, **settings):
        return (
            CheckpointSaver(prepared(**settings).accelerator, tmp_path / folder, **QUIET)
            .resume()
            .report.differences
        )

    assert differences("trained") == differences("frozen", wrap=frozen) == ()
    (told,) = differences("trained", wrap=frozen)
    assert told == f"{', '.join(names)}: trained when it was saved, frozen now (requires_grad)"
    (told,) = differences("frozen")
    assert told == f"{', '.join(names)}: frozen when it was saved, trained now (requires_grad)"


@pytest.mark.parametrize(
    ("mode", "found"),
    [
        ("auto", "checkpoint-4"),
        ("must", "checkpoint-4"),
        ("never", None),
        ("checkpoint-2", "checkpoint-2"),
    ],
)
def test_modes(tmp_path, mode, found):
    """--resume is ignored."""
    run = prepared()
    with CheckpointSaver(
        run.accelerator, tmp_path, every=Every(steps=2, signals=()), **QUIET
    ) as saver:
        train(run, saver, 5)
        progress = saver.resume(mode)
    assert (progress.resumed_from and progress.resumed_from.name) == found
    assert progress.step == {"checkpoint-4": 4, "checkpoint-2": 2, None: 5}[found]


@pytest.mark.parametrize("mode", ["auto", "must", "checkpoint-4"])
def test_each_thing_is_read_once(tmp_path, monkeypatch, mode):
    """The manifests of the folder when one is chosen, then its own, of the open file, and the
    state's document.
    """
    run = prepared()
    with CheckpointSaver(
        run.accelerator, tmp_path, every=Every(steps=2, signals=()), **QUIET
    ) as saver:
        train(run, saver, 4)
    read = []
    looked = (
        (stored_manifest, "manifest_from_json"),
        (opening, "parse_manifest"),
        (resume_opening, "read_document"),
    )
    for module, name in looked:
        real = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *given, real=real, name=name: (read.append(name), real(*given))[1]
        )
    progress = CheckpointSaver(run.accelerator, tmp_path, **QUIET).resume(mode)
    assert progress.resumed_from == tmp_path / "checkpoint-4"
    assert [read.count(name) for name in ("parse_manifest", "read_document")] == [1, 1]
    manifests = len(list(tmp_path.glob("checkpoint-*")))
    assert read.count("manifest_from_json") == manifests + (1 if mode in ("auto", "must") else 2)


def test_must_with_nothing_there(tmp_path):
    with pytest.raises(NotACheckpointError, match="no checkpoint with training state"):
        CheckpointSaver(prepared().accelerator, tmp_path).resume("must")
    assert CheckpointSaver(prepared().accelerator, tmp_path).resume().step == 0


def test_weights_alone_are_no_run(tmp_path):
    run = prepared()
    saver = CheckpointSaver(run.accelerator, tmp_path)
    saver.save(run.model, step=3)
    assert saver.resume().resumed_from is None
    with pytest.raises(NotACheckpointError, match="holds weights and no training state"):
        saver.resume("checkpoint-3")


class Counter:
    """A user's object: plain values, tensors, numbers beyond JSON."""

    def __init__(self, count=0):
        self.state = {
            "count": count,
            "history": [1.5, float("inf")],
            "seen": torch.arange(3),
            7: ("a", None),
        }

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_objects_of_the_user(tmp_path):
    """Early stopping, the average of the weights, registered objects are forgotten."""
    run, counter, average = prepared(), Counter(3), network()
    run.accelerator.register_for_checkpointing(counter)
    saver = CheckpointSaver(run.accelerator, tmp_path, **QUIET)
    saver.register(ema=average, stopping=Counter(5))
    saver.save_state()
    other, found, restored, stopping = prepared(), Counter(), network(), Counter()
    other.accelerator.register_for_checkpointing(found)
    CheckpointSaver(other.accelerator, tmp_path, **QUIET).resume(ema=restored, stopping=stopping)
    assert (found.state["count"], stopping.state["count"]) == (3, 5)
    assert found.state["history"] == [1.5, float("inf")]
    assert torch.equal(found.state["seen"], torch.arange(3))
    assert found.state[7] == ("a", None)
    for name, tensor in average.state_dict().items():
        assert torch.equal(tensor, restored.state_dict()[name])


def test_what_is_missing_on_either_side_is_an_error(tmp_path):
    run = prepared()
    CheckpointSaver(run.accelerator, tmp_path).save_state(stopping=Counter())
    with pytest.raises(LoadError, match="stopping: absent: in the checkpoint, not in this run"):
        CheckpointSaver(run.accelerator, tmp_path).resume()
    saver = CheckpointSaver(run.accelerator, tmp_path)
    with pytest.raises(LoadError, match="other: absent: not in the checkpoint"):
        saver.resume(other=Counter(), stopping=Counter())
    for allowed in (["other"], "other"):
        assert saver.resume(allow=allowed).report.problems == (
            "other: absent: not in the checkpoint",
        )


def test_without_accelerate(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    saver = CheckpointSaver(None, tmp_path)
    saver.register(model=model, optimizer=optimizer)
    for _ in range(2):
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        saver.step()
    saver.save_state()
    fresh = network()
    again = torch.optim.SGD(fresh.parameters(), lr=0.7)
    CheckpointSaver(None, tmp_path).resume(model=fresh, optimizer=again)
    assert again.param_groups[0]["lr"] == 0.1
    for one, other in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(
            optimizer.state[one]["momentum_buffer"], again.state[other]["momentum_buffer"]
        )


def test_moments_follow_their_parameters(tmp_path):
    """Same shapes in another order, and the moments of one land on the other."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    optimizer = torch.optim.AdamW([model["a"].weight, model["b"].weight])
    (model["a"](torch.ones(1, 3)) * 2 + model["b"](torch.rand(1, 3))).sum().backward()
    optimizer.step()
    CheckpointSaver(None, tmp_path).save_state(model, optimizer=optimizer)
    swapped = torch.optim.AdamW([model["b"].weight, model["a"].weight])
    CheckpointSaver(None, tmp_path).resume(model=model, optimizer=swapped)
    for name in ("a", "b"):
        one, other = optimizer.state[model[name].weight], swapped.state[model[name].weight]
        assert torch.equal(one["exp_avg"], other["exp_avg"])
    assert not torch.equal(
        optimizer.state[model["a"].weight]["exp_avg"], optimizer.state[model["b"].weight]["exp_avg"]
    )


def test_other_parameters_are_refused(tmp_path):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    CheckpointSaver(None, tmp_path).save_state(model, optimizer=optimizer)
    fewer = torch.optim.AdamW(list(model.parameters())[1:])
    with pytest.raises(
        LoadError, match=r"0\.weight: in the checkpoint's optimizer, not trained here"
    ):
        CheckpointSaver(None, tmp_path).resume(model=model, optimizer=fewer)


class Odd(torch.optim.SGD):
    """An optimizer with an entry in its state that is neither tensor nor number."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.state[self.param_groups[0]["params"][0]]["odd"] = object()


def test_an_odd_optimizer_is_refused_when_the_saver_is_made(tmp_path):
    """Found out at the end of the training."""
    accelerator = prepared().accelerator
    accelerator.prepare(Odd(accelerator._models[0].parameters()))
    with pytest.raises(SelectionError, match=r"0\.weight: odd: builtins\.object"):
        CheckpointSaver(accelerator, tmp_path, every=Every(steps=1))


def test_eight_bit_state(tmp_path):
    """8-bit moments with their maps and scales."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = nn.Linear(128, 64)
    optimizer = bitsandbytes.optim.AdamW8bit(model.parameters(), lr=0.01)
    try:
        model(torch.ones(2, 128)).sum().backward()
        optimizer.step()
    except (RuntimeError, NotImplementedError, AttributeError):
        pytest.skip("this bitsandbytes has no 8-bit optimizer for the CPU")
    assert optimizer.state[model.weight]["state1"].dtype == torch.uint8
    CheckpointSaver(None, tmp_path).save_state(model, optimizer=optimizer)
    fresh = nn.Linear(128, 64)
    again = bitsandbytes.optim.AdamW8bit(fresh.parameters(), lr=0.5)
    CheckpointSaver(None, tmp_path).resume(model=fresh, optimizer=again)
    for both, opt in ((model, optimizer), (fresh, again)):
        both.zero_grad()
        both(torch.ones(2, 128)).square().sum().backward()
        opt.step()
    assert torch.equal(model.weight, fresh.weight)


def test_lossy_weights_do_not_make_a_lossy_run(tmp_path):
    """The weights are stored in bfloat16; what is resumed has all its bits."""
    run = prepared()
    with CheckpointSaver(run.accelerator, tmp_path, dtype="bfloat16", **QUIET) as saver:
        train(run, saver, 4)
        report = saver.save_state()
        weights = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    assert report.casts
    other = prepared()
    CheckpointSaver(other.accelerator, tmp_path, **QUIET).resume()
    assert all(
        torch.equal(tensor, other.model.state_dict()[name]) for name, tensor in weights.items()
    )


@pytest.mark.parametrize("format_name", ["h5", "dual"])
def test_in_other_formats(tmp_path, format_name):
    expected = whole(tmp_path / "whole")
    run = prepared()
    with CheckpointSaver(run.accelerator, tmp_path / "run", format=format_name, **QUIET) as saver:
        done = train(run, saver, 7)
        saver.save_state()
    assert done + go_on(tmp_path / "run") == expected


def test_load_model_reads_the_weights_beside_the_state(tmp_path):
    run = prepared()
    path = CheckpointSaver(run.accelerator, tmp_path).save_state().path
    model = ft_ckpt.load_model(path, into=network())
    assert torch.equal(model[0].weight, run.model[0].weight)


def test_a_state_whose_manifest_has_no_step_is_refused(tmp_path):
    CheckpointSaver().save_state(models.build("llama"), tmp_path / "x")
    rewrite_manifest(tmp_path / "x", lambda document: document.update(step=None))
    with pytest.raises(CorruptError, match=r"progress\.step: 0, expected None as in the manifest"):
        CheckpointSaver().resume(tmp_path / "x", model=models.build("llama"))


@pytest.mark.parametrize("method", ["cartridge", "cpt"])
def test_frozen_parameters_of_an_adapter_come_back(tmp_path, method):
    """PEFT stores them in another form; another process may begin with others."""
    model, again = (
        with_adapter(models.build("llama"), UNMERGEABLE[method]([]), seed) for seed in (3, 4)
    )
    frozen = {
        name: one for name, one in again.prompt_encoder.named_parameters() if not one.requires_grad
    }
    assert frozen
    with torch.no_grad():
        for one in frozen.values():
            one.add_(1)
    CheckpointSaver().save_state(model, tmp_path / "x")
    CheckpointSaver().resume(tmp_path / "x", model=again)
    found = dict(again.prompt_encoder.named_parameters())
    assert all(
        torch.equal(one, found[name]) for name, one in model.prompt_encoder.named_parameters()
    )


def test_a_lora_run_is_its_adapter_and_its_optimizer(tmp_path):
    """Every checkpoint of a LoRA run holds the frozen base."""
    model = models.build("lora_wide")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    model(**models.batch(seed=0)).loss.backward()
    optimizer.step()
    report = CheckpointSaver(None, tmp_path).save_state(model, optimizer=optimizer)
    adapter = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert report.kind == "adapter"
    assert report.bytes <= 3 * adapter + 256_000
    base = sum(p.nbytes for p in model.parameters()) - adapter
    assert base > 6_000_000
    fresh = models.build("lora_wide", seed=0)
    with torch.no_grad():
        for parameter in (p for p in fresh.parameters() if p.requires_grad):
            parameter.zero_()
    again = torch.optim.AdamW([p for p in fresh.parameters() if p.requires_grad])
    CheckpointSaver(None, tmp_path).resume("must", model=fresh, optimizer=again)
    for one, other in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_gradient_scaler(tmp_path):
    """The scale of mixed precision begins anew."""
    model = network()
    scaler, again = (torch.amp.GradScaler("cpu", init_scale=scale) for scale in (512.0, 4.0))
    scaler.scale(torch.ones(1))  # it has a scale once it was used
    CheckpointSaver(None, tmp_path).save_state(model, scaler=scaler)
    CheckpointSaver(None, tmp_path).resume("must", model=model, scaler=again)
    assert again.get_scale() == 512.0


STATE_FILES = [
    "state/training.json",
    "state/training.safetensors",
    "model.safetensors",
    "ft_ckpt.json",
]


@pytest.mark.sample(8)
@pytest.mark.parametrize("file", STATE_FILES)
@pytest.mark.parametrize("damage", ["delete", "truncate", "flip", "pickle"])
def test_damage_is_named_and_an_older_checkpoint_taken(tmp_path, file, damage):
    """A damaged file is passed over in silence, or a pickle in its place is run."""
    run = prepared()
    with CheckpointSaver(
        run.accelerator, tmp_path, every=Every(steps=2, signals=()), **QUIET
    ) as saver:
        train(run, saver, 4)
    hurt(tmp_path / "checkpoint-4" / file, damage, tmp_path / "executed")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        progress = CheckpointSaver(prepared().accelerator, tmp_path, **QUIET).resume()
    assert progress.resumed_from.name == "checkpoint-2"
    if file != "ft_ckpt.json":  # without its manifest it is no checkpoint, and nothing to warn of
        assert any(file in str(warning.message) for warning in seen), [
            str(one.message) for one in seen
        ]
        with pytest.raises(
            CorruptError, match=r"checkpoint-4.*the newest whole one is .*checkpoint-2"
        ):
            CheckpointSaver(prepared().accelerator, tmp_path, **QUIET).resume("must")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("file", STATE_FILES)
def test_a_run_does_not_begin_afresh_beside_what_may_be_its_own(tmp_path, file):
    run = prepared()
    with CheckpointSaver(
        run.accelerator, tmp_path, every=Every(steps=4, signals=()), **QUIET
    ) as saver:
        train(run, saver, 4)
    (tmp_path / "notes").mkdir()
    hurt(tmp_path / "checkpoint-4" / file, "truncate", None)
    with (
        pytest.warns(UserWarning, match="checkpoint-4"),
        pytest.raises((CorruptError, ManifestError)) as told,
    ):
        CheckpointSaver(prepared().accelerator, tmp_path, **QUIET).resume()
    assert "afresh" in str(told.value)
    assert CheckpointSaver(prepared().accelerator, tmp_path, **QUIET).resume("never").step == 0


def test_a_run_does_not_begin_afresh_where_the_system_would_not_read(tmp_path, monkeypatch):
    run = prepared()
    with CheckpointSaver(
        run.accelerator, tmp_path, every=Every(steps=2, signals=()), **QUIET
    ) as saver:
        train(run, saver, 4)
    real = LocalStore.open

    def refuse(store, name):
        if name == MANIFEST_NAME:
            raise UnreadableError(
                f"{store.where(name)}: cannot be read (stale file handle); try again"
            )
        return real(store, name)

    monkeypatch.setattr(LocalStore, "open", refuse)
    with pytest.raises(UnreadableError, match=r"checkpoint-4.*stale"):
        CheckpointSaver(prepared().accelerator, tmp_path, **QUIET).resume()
    with pytest.raises(UnreadableError, match=r"checkpoint-4.*stale"):
        latest(tmp_path)


class Bomb:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return open, (str(self.target), "w")


def hurt(path, damage, target):
    content = path.read_bytes()
    if damage == "delete":
        path.unlink()
    elif damage == "truncate":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "flip":
        middle = len(content) * 3 // 4
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    else:
        path.write_bytes(pickle.dumps(Bomb(target)))


def test_no_pickle_in_a_checkpoint(tmp_path):
    """Optimizer and random numbers in pickles, which newer torch refuses and anybody can
    replace.
    """
    run = prepared(accumulate=4)
    with CheckpointSaver(run.accelerator, tmp_path, **QUIET) as saver:
        train(run, saver, 2)
        path = saver.save_state(stopping=Counter()).path
    for file in (path / "state").iterdir():
        if file.suffix == ".json":
            json.loads(file.read_text())
        else:
            assert ft_ckpt.load(file, format="safetensors")
    assert sorted(file.name for file in path.rglob("*") if file.is_file()) == sorted(
        ["ft_ckpt.json", "model.safetensors", "training.json", "training.safetensors"]
    )


def test_best_metric_and_retention_survive_a_resume(tmp_path):
    """The best metric is forgotten, and the best checkpoint deleted."""
    every, keep = Every(best=("loss", "min"), signals=()), Keep(last=1, best=("loss", "min"))
    run = prepared()
    with CheckpointSaver(run.accelerator, tmp_path, every=every, keep=keep, **QUIET) as saver:
        for loss in (3.0, 1.0, 2.0):
            saver.step({"loss": loss})
        saver.save_state(metrics={"loss": 2.0})
    run = prepared()
    with CheckpointSaver(run.accelerator, tmp_path, every=every, keep=keep, **QUIET) as saver:
        assert saver.resume().step == 3
        assert saver.step({"loss": 1.5}) is None
        assert saver.step({"loss": 0.5}) is not None
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [
        "checkpoint-3",
        "checkpoint-5",
    ]


def test_settings_are_proved():
    with pytest.raises(
        ConfigError,
        match=r"every='500': expected Every\(\.\.\.\), a number or None; on_failure='no'",
    ):
        CheckpointSaver(every="500", on_failure="no")
