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

# Cases that take long and of which a shorter one beside them stays in the default run: `scripts/test --all` has them.
ONLY_IN_ALL = {
    "test_bench": ["measured"],
    "test_commit": ["recovery_stopped[pour-2]", "recovery_stopped[sideline-5]", "every_call[sideline]", "-sideline]"],
    "test_sweep": ["over_the_remains[3]", "finished_before_it_is_dropped", "side_by_side"],
    "test_bucket_sweep": ["that_finishes_others_is_stopped"],
    "test_check_resume": ["a_scheduler_that_is_not_saved"],
    "test_resume_wrappers": [
        "fsdp2_tensor_parallel-4]",
        "fsdp2-2-fsdp2-4]",
        "ddp-2-hsdp-4]",
        "under_auto_tp_with_zero",
    ],
    "test_zero_optimizer": ["gradients32", "robin", "subgroups", "persistent"],
    "test_trainer": ["models_that_transformers_has_cut"],
    "test_accelerators": ["without_streams", "shares_from_devices_of_their_own"],
    "test_experts": ["partitions_of_zero"],
    "test_crowd": ["does_not_grow_with_the_ranks"],
    "test_fill": ["twenty_thousand"],
    "test_convert": ["memory_does_not_grow", "any_tensors_survive_any_road"],
    "test_hdf5": ["mutated_files_give_right_values_or_an_error[1-25]", "cannot_be_tried_is_not_opened[memory]"],
    "test_killed": ["every_step[2-4]"],
    "test_direct": ["test_four_ranks"],
    "test_engines": ["test_four_ranks[fsdp2]"],
    "test_examples": ["runs_unchanged_when_sharded", "test_ppo_earns_more"],
    "test_background": ["every_checkpoint_is_one_step"],
    "test_reuse": ["killed_in_the_middle"],
    "test_documents": ["site_is_built_without_a_warning"],
}


@pytest.hookimpl(tryfirst=True)  # before -m selects by the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files, mark the cases of ONLY_IN_ALL, and skip tests that need an accelerator where there is none."""
    for item in items:
        parts = ONLY_IN_ALL.get(Path(item.path).stem, ())
        if any(part in item.name or part in getattr(item, "fixturenames", ()) for part in parts):
            item.add_marker(pytest.mark.slow)
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
