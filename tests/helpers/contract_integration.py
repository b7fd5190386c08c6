"""Contract tests of the ways in which trainings use ft_ckpt.

Inherit `IntegrationContract`, or `WeightsContract` if weights alone are saved, and define a fixture
`integration`.
"""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from faults import Disk, World
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn

import ft_ckpt
from ft_ckpt.checkpoint.catalog import CheckpointInfo, discover
from ft_ckpt.errors import NotACheckpointError
from ft_ckpt.storage.places import open_place

STOP = 3  # steps until the runs of the contract are killed


class Integration(ABC):
    """Short trainings of a tiny Llama, or of adapters on it, that save each step."""

    model: nn.Module  # of the training that `train` did last: the part that is saved

    @abstractmethod
    def train(
        self,
        folder: Path | None,
        *,
        kind: str = "llama",
        stop_after: int | None = None,
        resume: str | bool | None = None,
        seed: int = 0,
        background: bool = False,
        keep: int | None = None,
    ) -> list[Any]:
        """Train to the end, or until a kill after `stop_after` steps; return a value for each step.

        The value has what was read and computed in the step. `folder` None trains without ft_ckpt.
        `seed` is that of the first weights. `resume` is as for `CheckpointSaver.resume`; None does
        not resume.
        """


def checkpoints(folder: Path) -> list[CheckpointInfo]:
    """List the checkpoints in the folder, from the oldest to the newest."""
    return discover(open_place(folder))


def assert_loads_as(folder: Path, model: nn.Module) -> None:
    """Assert that a checkpoint in `folder`, loaded, has the outputs of `model`."""
    batch = torch.arange(8)[None]
    expected = model.eval()(batch).logits
    loaded = ft_ckpt.load_model(folder)
    assert torch.equal(loaded.eval()(batch).logits, expected)


def flip_last_bit(file: Path) -> None:
    """Change the last bit of a file, as a failing disk may."""
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


class WeightsContract:
    def test_a_checkpoint_is_the_model_without_a_pickle(
        self, integration: Integration, tmp_path: Path
    ) -> None:
        integration.train(tmp_path)
        newest = checkpoints(tmp_path)[-1].path
        assert isinstance(newest, Path)
        assert_loads_as(newest, integration.model)
        for info in checkpoints(tmp_path):
            report = ft_ckpt.verify(info.path)
            assert report.ok, report.problems
        suffixes = {path.suffix for path in tmp_path.rglob("[!.]*") if path.is_file()}
        assert suffixes - {".json", ".safetensors", ".jinja", ".md"} == set()

    def test_adapters_are_saved_without_their_base(
        self, integration: Integration, tmp_path: Path
    ) -> None:
        integration.train(tmp_path, kind="lora")
        newest = checkpoints(tmp_path)[-1].path
        assert isinstance(newest, Path)
        assert not list(newest.glob("model*.safetensors"))
        saved = load_file(newest / "adapter_model.safetensors")
        adapters = get_peft_model_state_dict(integration.model)
        assert saved.keys() == adapters.keys()
        assert all(torch.equal(saved[name], tensor) for name, tensor in adapters.items())
        assert isinstance(PeftModel.from_pretrained(models.llama(), newest), PeftModel)

    def test_a_limit_keeps_the_newest(self, integration: Integration, tmp_path: Path) -> None:
        (tmp_path / "notes").mkdir()
        integration.train(tmp_path, keep=2)
        kept = [info.manifest.step for info in checkpoints(tmp_path)]
        integration.train(tmp_path / "all")
        assert kept == [info.manifest.step for info in checkpoints(tmp_path / "all")][-2:]
        assert (tmp_path / "notes").exists()

    def test_an_error_in_the_middle_of_a_save_leaves_those_before_it(
        self, integration: Integration, tmp_path: Path
    ) -> None:
        undisturbed = World(Disk("EIO"))
        undisturbed.run(integration.train, tmp_path / "whole")
        steps = len(checkpoints(tmp_path / "whole"))
        counts = []
        for part in (0.4, 0.5, 0.6):
            folder = tmp_path / str(part)
            world = World(Disk("EIO"), "EIO", int(undisturbed.count * part))
            world.run(integration.train, folder)
            assert world.is_met
            saved = checkpoints(folder)
            assert all(ft_ckpt.verify(info.path).ok for info in saved)
            counts.append(len(saved))
            self.check_the_rest(integration, folder, len(saved))
        assert 0 < min(counts) < steps

    def check_the_rest(self, integration: Integration, folder: Path, steps: int) -> None:
        """Check a run that ended with an error after its first `steps` were saved."""


class IntegrationContract(WeightsContract):
    def check_the_rest(self, integration: Integration, folder: Path, steps: int) -> None:
        expected = integration.train(None)
        assert integration.train(folder, resume="must", seed=1) == expected[steps:]

    @pytest.mark.parametrize("kind", ["llama", "lora"])
    def test_a_killed_run_goes_on_exactly(
        self, integration: Integration, tmp_path: Path, kind: str
    ) -> None:
        expected = integration.train(None, kind=kind)
        whole = integration.model.state_dict()
        steps = integration.train(tmp_path, kind=kind, stop_after=STOP)
        for stop in (STOP + 2, None):
            # adapters are resumed on the base that they were trained on
            seed = 0 if kind == "lora" else 1
            steps += integration.train(
                tmp_path, kind=kind, stop_after=stop, resume="auto", seed=seed
            )
        assert steps == expected
        resumed = integration.model.state_dict()
        assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())

    def test_saves_in_the_background_are_those_of_their_steps(
        self, integration: Integration, tmp_path: Path
    ) -> None:
        expected = integration.train(None)
        steps = integration.train(tmp_path, stop_after=STOP, background=True)
        steps += integration.train(tmp_path, resume="must", seed=1, background=True)
        assert steps == expected
        integration.train(tmp_path / "foreground")
        pairs = zip(checkpoints(tmp_path), checkpoints(tmp_path / "foreground"), strict=True)
        for info, foreground in pairs:
            saved = load_file(Path(info.path) / "model.safetensors")
            expected_tensors = load_file(Path(foreground.path) / "model.safetensors")
            assert saved.keys() == expected_tensors.keys()
            assert all(torch.equal(saved[name], expected_tensors[name]) for name in saved)

    def test_the_first_start_and_the_second_are_one_line(
        self, integration: Integration, tmp_path: Path
    ) -> None:
        """A script that is killed is started again as it was."""
        with pytest.raises(NotACheckpointError, match=r"no (whole )?checkpoint"):
            integration.train(tmp_path, resume="must")
        assert len(integration.train(tmp_path, stop_after=1, resume="auto")) == 1
        assert len(integration.train(tmp_path, stop_after=2, resume="auto")) == 1

    def test_a_damaged_and_a_half_written_checkpoint_are_passed_over(
        self, integration: Integration, tmp_path: Path
    ) -> None:
        expected = integration.train(tmp_path, stop_after=STOP)
        newest = Path(checkpoints(tmp_path)[-1].path)
        half = newest.with_name(newest.name.replace(str(STOP), str(STOP + 1)))
        half.mkdir()
        (half / "model.safetensors").write_bytes(b"half")
        flip_last_bit(newest / "state" / "training.safetensors")
        with pytest.warns(UserWarning, match=f"{newest.name}: .*(not whole|damaged)"):
            steps = integration.train(tmp_path, stop_after=STOP, resume="auto", seed=1)
        assert steps == expected[STOP - 1 :]

    def test_the_best_is_found_by_what_the_run_logged(
        self, integration: Integration, tmp_path: Path
    ) -> None:
        integration.train(tmp_path)
        manifests = [info.manifest for info in checkpoints(tmp_path)]
        step = min(manifests, key=lambda manifest: manifest.metrics["loss"]).step
        best = ft_ckpt.best(tmp_path, ("loss", "min"))
        assert best is not None
        assert Path(best).name.endswith(f"-{step}")
        integration.train(tmp_path / "again", stop_after=step)
        assert_loads_as(Path(best), integration.model)
