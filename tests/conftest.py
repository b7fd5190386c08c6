"""Settings every test runs under: no network, one thread per process, and one seed: what fails once fails again.

FT_CKPT_SEED chooses another seed, for property-based tests too; `scripts/test --all` draws one.

The longest files begin first.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import extensions
import pytest
import torch
from hypothesis import settings
from places import HELPERS
from s3_server import S3, running_s3

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
SEED = os.environ.setdefault("FT_CKPT_SEED", "0")
settings.register_profile("seeded", derandomize=SEED == "0")
settings.load_profile("seeded")
extensions.settle_folder()

# A file runs on one worker, so what takes a minute must not begin when the other worker has nothing left.
LONGEST_FILES = (
    *("test_distributed", "test_check_resume", "test_trainer", "test_position", "test_examples"),
    *("test_resume_wrappers", "test_documents", "test_direct", "test_background", "test_faults", "test_bench"),
    *("test_killed", "test_zero_optimizer", "test_commit", "test_structure", "test_compression", "test_reuse"),
    *("test_hdf5", "test_running", "test_resume", "test_opening", "test_convert"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of the longest files first, in the order above; skip those that need an accelerator without one."""
    places = {name: place for place, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: places.get(Path(item.path).stem, len(places)))
    marked = [item for item in items if item.get_closest_marker("accelerator")]
    if marked and not torch.accelerator.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no accelerator here"))


@pytest.fixture
def s3() -> Iterator[S3]:
    """An S3 server on loopback with an empty bucket, s3://bucket, see tests/helpers/s3_server.py."""
    pytest.importorskip("obstore")
    with running_s3() as server:
        yield server


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of faulty.c, by which calls to the disk fail, or end their process: for LD_PRELOAD."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C compiler, and a loader that takes LD_PRELOAD")
    library = tmp_path_factory.mktemp("faulty") / "faulty.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-w", "-o", library, HELPERS / "faulty.c", "-ldl"], check=True)
    return library
