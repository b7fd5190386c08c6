"""The checkpoints of the tests of this folder, and no long pauses."""

import pytest
from engine_files import EngineFiles, engine_files

import ft_ckpt.extensions.rl.publishing as publishing


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> EngineFiles:
    """Checkpoints that no test changes."""
    return engine_files(tmp_path_factory.mktemp("engines"))


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "_RESUME_PAUSE_SECONDS", 0.01)
