"""The checkpoints of the tests of this folder."""

import pytest
from engine_files import EngineFiles, engine_files


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> EngineFiles:
    """Checkpoints that no test changes."""
    return engine_files(tmp_path_factory.mktemp("engines"))
