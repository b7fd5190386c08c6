"""The checkpoints of the tests of this folder, and no long pauses."""

import pytest
from engine_files import EngineFiles, engine_files

from ft_ckpt.extensions.rl.publishing import weights_update


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> EngineFiles:
    """Save checkpoints that no test changes."""
    return engine_files(tmp_path_factory.mktemp("engines"))


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_update, "_RESUME_PAUSE_SECONDS", 0.01)
