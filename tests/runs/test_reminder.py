"""A loop that has a schedule and never calls `saver.step()` is told so; a loop that calls it is
not.
"""

import subprocess
import sys
import textwrap
import warnings

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from ft_ckpt import CheckpointSaver, Every, checkpoint_closure

WORDS = r"saver\.step\(\): not called in"


def objects():
    model = torch.nn.Linear(1, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def loader():
    return DataLoader(torch.ones(4, 1))


def saved_in(folder):
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def train_all(saver, model, optimizer):
    for batch in saver.remaining(loader(), epochs=1):
        train(model, optimizer, batch)


def train(model, optimizer, batch):
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_loop_without_step_is_told_at_the_end_of_its_data(tmp_path):
    model, optimizer = objects()
    with CheckpointSaver(None, tmp_path, every=100) as saver:
        saver.resume(model=model, optimizer=optimizer)
        with pytest.warns(
            UserWarning, match=rf"{WORDS} 4 batch\(es\) and 4 optimizer step\(s\), so every=... has"
        ):
            train_all(saver, model, optimizer)


def test_it_is_told_when_the_first_save_was_due_and_once(tmp_path):
    model, optimizer = objects()
    told = []
    with (
        CheckpointSaver(None, tmp_path, every=2) as saver,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        saver.resume(model=model, optimizer=optimizer)
        for batch in saver.remaining(loader(), epochs=3):
            told.append(len(caught))
            train(model, optimizer, batch)
    assert told[:3] == [0, 0, 1]
    assert len(caught) == 1


def test_weights_that_change_prove_it_without_an_optimizer(tmp_path):
    model, optimizer = objects()
    with CheckpointSaver(None, tmp_path, every=100) as saver:
        saver.resume(model=model)
        with pytest.warns(UserWarning, match=rf"{WORDS} 4 batch\(es\), so"):
            train_all(saver, model, optimizer)


def test_a_loop_of_its_own_is_told_when_the_saver_is_closed(tmp_path):
    model, optimizer = objects()
    saver = CheckpointSaver(None, tmp_path, every=100)
    saver.register(model=model, optimizer=optimizer)
    for batch in loader():
        train(model, optimizer, batch)
    with pytest.warns(UserWarning, match=rf"{WORDS} 4 optimizer step\(s\)"):
        saver.close()


def test_a_script_is_told_when_it_ends(tmp_path):
    script = f"""
        import sys, torch, ft_ckpt
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        saver = ft_ckpt.CheckpointSaver(None, {str(tmp_path / "run")!r}, every=100)
        saver.register(model=model, optimizer=optimizer)
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        if sys.argv[1:]:
            raise ValueError("the script's own error")
        """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    ended = subprocess.run(
        [sys.executable, tmp_path / "script.py"], capture_output=True, text=True, check=True
    )
    assert "saver.step(): not called in 1 optimizer step(s)" in ended.stderr
    failed = subprocess.run(
        [sys.executable, tmp_path / "script.py", "fail"], capture_output=True, text=True
    )
    assert failed.returncode == 1
    assert "saver.step()" not in failed.stderr


@pytest.fixture
def quiet():
    """Fails after any warning, whoever would have caught it as an error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    assert [str(warning.message) for warning in caught] == []


@pytest.mark.usefixtures("quiet")
class TestNotTold:
    """Loops that are right, or of which nothing is proved."""

    @pytest.mark.parametrize(("accumulate", "steps"), [(1, [2, 4, 6, 8]), (3, [2, 4]), (8, [2])])
    def test_a_loop_that_accumulates(self, tmp_path, accumulate, steps):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        model, optimizer, data = accelerator.prepare(*objects(), loader())
        with CheckpointSaver(accelerator, tmp_path, every=2) as saver:
            saver.resume()
            for batch in saver.remaining(data, epochs=2):
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch).sum())
                    optimizer.step()
                    optimizer.zero_grad()
                saver.step()
        assert saved_in(tmp_path) == [f"checkpoint-{step}" for step in steps]

    def test_a_loop_that_accumulates_by_itself_and_calls_step_at_its_steps_only(self, tmp_path):
        model, optimizer = objects()
        with CheckpointSaver(None, tmp_path, every=2) as saver:
            saver.resume(model=model, optimizer=optimizer)
            for number, batch in enumerate(saver.remaining(loader(), epochs=2), 1):
                model(batch).sum().backward()
                if number % 4 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                    saver.step()
        assert saved_in(tmp_path) == ["checkpoint-2"]

    def test_a_loop_that_only_evaluates(self, tmp_path):
        model, optimizer = objects()
        with CheckpointSaver(None, tmp_path, every=2) as saver:
            saver.resume(model=model, optimizer=optimizer)
            for batch in saver.remaining(loader(), epochs=1):
                model(batch)
        assert saved_in(tmp_path) == []

    def test_a_run_without_a_schedule(self, tmp_path):
        model, optimizer = objects()
        with CheckpointSaver(None, tmp_path) as saver:
            saver.resume(model=model, optimizer=optimizer)
            for batch in saver.remaining(loader(), epochs=1):
                train(model, optimizer, batch)
        assert saved_in(tmp_path) == []

    def test_a_loop_that_is_left_early_by_an_error(self, tmp_path):
        model, optimizer = objects()
        with pytest.raises(ZeroDivisionError), CheckpointSaver(None, tmp_path, every=2) as saver:  # noqa: PT012
            saver.resume(model=model, optimizer=optimizer)
            for batch in saver.remaining(loader(), epochs=1):
                train(model, optimizer, batch)
                raise ZeroDivisionError

    def test_closures_that_the_schedule_runs(self, tmp_path):
        model, optimizer = objects()
        with CheckpointSaver(None, tmp_path, every=Every(steps=2)) as saver:
            saver.resume(model=model, optimizer=optimizer)
            evaluate = checkpoint_closure(saver=saver)(lambda: "done")
            results = []
            for batch in saver.remaining(loader(), epochs=1):
                train(model, optimizer, batch)
                results.append(evaluate())
        assert results == [None, "done", None, "done"]
