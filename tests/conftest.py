"""Settings of all tests: no network, one thread per process, and one seed, so that a failure repeats.

FT_CKPT_SEED chooses another seed, for property-based tests too; `scripts/test --all` draws one.

The longest files begin first.
"""

import gc
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import extensions
import pytest
import torch
from hypothesis import settings
from launch import share_nursery
from places import HELPERS
from s3_server import S3, running_s3
from seeds import examples
from xdist.scheduler import LoadFileScheduling

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
SEED = os.environ.setdefault("FT_CKPT_SEED", "0")
settings.register_profile("seeded", derandomize=SEED == "0", max_examples=examples(100))
settings.load_profile("seeded")
extensions.settle_folder()

# A file runs on one worker, so a file of a minute must not be the last to start, when the other worker is idle.
LONGEST_FILES = (
    *("test_distributed", "test_documents", "test_trainer", "test_ranks_behaviour", "test_check_resume", "test_follow"),
    *("test_position", "test_examples", "test_publish_cli", "test_staging", "test_cli", "test_replicas", "test_faults"),
    *("test_resume_wrappers", "test_direct", "test_background", "test_zero_optimizer", "test_compression", "test_hdf5"),
    *("test_commit", "test_reuse", "test_running", "test_resume", "test_opening", "test_convert", "test_killed"),
)

_SECONDS_OF_SLOW_TESTS = 7200  # campaigns, on a machine with other work

# Campaigns of several cases that share nothing: workers take the cases one by one, and not the file.
CAMPAIGNS = {
    "test_a_copy_that_is_killed_at_any_request_is_finished_by_the_next",
    "test_a_copy_that_is_refused_from_any_request_on_is_finished_by_the_next",
    "test_a_fault_at_every_request_of_two_writers",
    "test_a_flipped_bit_goes_nowhere",
    "test_a_run_that_is_killed_at_any_request_goes_on",
    "test_a_run_that_is_stopped_at_any_request_goes_on",
    "test_commands_that_are_killed_anywhere_are_finished_by_the_next_call",
    "test_every_fault",
    "test_every_fault_in_every_file",
    "test_every_fault_of_a_read",
    "test_hundreds_of_damaged_inputs",
    "test_killed_and_its_recovery_stopped",
    "test_killed_two_hundred_times",
    "test_mutated_files_give_right_values_or_an_error",
    "test_no_flipped_bit_gives_another_model",
}

# Slow cases, most of them with a faster one beside them in the default run: only `scripts/test --all` runs them.
ONLY_IN_ALL = {
    "test_accelerators": [
        "no_wait_is_missed[background_before_the_copy",
        "no_wait_is_missed[exact_memory",
        "no_wait_is_missed[frozen_reuse",
        "no_wait_is_missed[numbers_that_are_none",
        "no_wait_is_missed[resume_large",
        "test_two_ranks[two_ranks",
    ],
    "test_adapters": ["are_loaded[h5-[34, 103", "are_loaded[h5-{", "are_loaded[safetensors-[34, 46"],
    "test_adapter_fields": ["some_fields[dora]", "some_fields[loha]"],
    "test_background": ["test_two_ranks_of_deepspeed[zero3]"],
    "test_bucket_sweep": ["a_pin_and_a_removal[strips]", "and_a_removal[strip_in_bucket]", "at_each_request[refused]"],
    "test_check_resume": ["never called saver.step()"],
    "test_commit": [
        "-sideline]",
        "every_call[Ctrl-C-exchange]",
        "every_call[Ctrl-C-pour]",
        "every_call[EIO-pour]",
        "every_call[sideline]",
        "killed_at_every_call[exchange]",
        "killed_at_every_call[pour]",
        "killed_at_every_call[rename]",
        "recovery_stopped[exchange-1]",
        "recovery_stopped[pour-2]",
        "recovery_stopped[sideline-5]",
    ],
    "test_convert": ["half_done[y.h5]", "half_done[y.pt]"],
    "test_copies": [
        "[across-answer lost]",
        "[across-gone]",
        "[across-refused]",
        "[down-answer lost]",
        "[down-gone]",
        "[down-refused]",
        "[up-gone]",
        "[up-refused]",
    ],
    "test_crowd": ["does_not_come[38]"],
    "test_dual": ["where_hdf5_looks[3000]"],
    "test_fall_backs": ["twenty_thousand_tiny_ones[direct, fsdp2]", "twenty_thousand_tiny_ones[one writer]"],
    "test_follow": ["test_on_two_ranks[saver_publish]"],
    "test_foreign": ["rebuilt[raw]"],
    "test_hdf5": [
        "cannot_be_tried_is_not_opened[memory]",
        "mutated_files_give_right_values_or_an_error[1-25]",
        "test_the_library_finds_every_name[40000]",
    ],
    "test_hub_buckets": [
        "from_any_request_on_is_finished_by_the_next[over-3]",
        "next[down-3]",
        "next[down-after-2]",
        "next[down-before-2]",
        "next[over-after-2]",
        "next[over-before-2]",
        "next[up-3]",
        "next[up-after-2]",
        "request[answer lost-3]",
    ],
    "test_killed": ["every_step[2-4]"],
    "test_killed_commands": [
        "next_call[append-folder]",
        "next_call[cp",
        "next_call[rebuild-folder]",
        "next_call[sync --delete-folder]",
    ],
    "test_lightning_runs": [
        "[short0-long0]",
        "[short1-long1]",
        "[short3-long3]",
        "any_step[accumulating]",
        "any_step[limited]",
        "any_step[plateau of epochs]",
        "any_step[plateau of steps]",
        "any_step[shuffled]",
        "any_step[stream]",
        "any_step[workers]",
    ],
    "test_many_ranks": ["that_it_holds[1024-fsdp1]", "that_it_holds[1024-fsdp2]", "that_it_holds[1024-zero3]"],
    "test_merge_files": ["test_a_quantised_base[8]"],
    "test_mutations": ["in_so_many_words[few]"],
    "test_opening": ["another_model[2-adapters]"],
    "test_position": [
        "another_batch_size_goes_on_after_the_samples_that_were_seen[prepared counted stream]",
        "asked_for[safetensors]",
        "batches_are_replayed[Stream]",
        "with_workers[datasets stream]",
        "with_workers[prepared stream]",
        "with_workers[prepared, kept]",
        "with_workers[prepared]",
        "with_workers[shuffled]",
        "with_workers[stateful stream]",
        "with_workers[stateful]",
        "with_workers[stream]",
    ],
    "test_readers": ["a_shipped_model[averaged"],
    "test_replicas": ["parts_that_several_of_four_ranks_hold[parts/hsdp/background]"],
    "test_resume": [
        "test_stopped_after_any_batch[shuffled-stops0]",
        "test_stopped_after_any_batch[stream, accumulating-stops0]",
        "test_stopped_after_any_batch[stream-stops0]",
    ],
    "test_resume_wrappers": [
        "ddp-2-fsdp2-2]",
        "ddp-2-hsdp-4]",
        "fsdp2-2-fsdp2-4]",
        "fsdp2_tensor_parallel-4]",
        "none-1-fsdp1-2]",
    ],
    "test_s3": ["is_taken_back[403]"],
    "test_signature": ["leaves_both_or_none[True]"],
    "test_signals": ["SIGINT", "[SIGUSR1", "while a batch"],
    "test_streams": ["a_metric_is[report]", "a_metric_is[show]", "no_command[words1]", "no_command[words2]"],
    "test_sweep": ["refused_at_every_call[Ctrl-C]"],
    "test_trainer": [
        "are_one_line[True0]",
        "are_one_line[True1]",
        "are_one_line[latest]",
        "test_the_final_model_is_ours[lora]",
    ],
    "test_writers": ["some_calls[10]", "some_calls[30]"],
    "test_zero_optimizer": [
        "gradients32",
        "persistent",
        "robin",
        "subgroups",
        "test_on_one_rank_and_from_two[arrive/zero1:zero2]",
    ],
}


def pytest_configure(config: pytest.Config) -> None:
    """Fork the workers of a run and their launches from one process; collect no garbage before the first test."""
    if getattr(config.option, "numprocesses", None):
        share_nursery()
        config.option.tx = [f"popen//python={sys.executable} {HELPERS / 'worker.py'}"] * len(config.option.tx)
    gc.disable()


class _ByFileOrCase(LoadFileScheduling):
    """Hands out whole files, whose tests share their launches, and single cases of campaigns."""

    def _split_scope(self, nodeid: str) -> str:
        function = nodeid.partition("::")[2].partition("[")[0]
        return nodeid if function in CAMPAIGNS else str(super()._split_scope(nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return _ByFileOrCase(config, log) if config.option.dist == "loadfile" else None


def pytest_collection_finish() -> None:
    """Exclude tests and libraries from later garbage collections, which would take a tenth of the run."""
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


# Families of many similar cases, and how many of them stay in the default run; always the same ones.
SAMPLED = {
    "test_a_change_after_the_call_is_not_in_the_checkpoint": 5,
    "test_a_request_that_fails_once_is_tried_again": 12,
    "test_a_wrong_value_is_named": 24,
    "test_adapter_loads_on_its_base": 12,
    "test_an_older_one_takes_the_place_of_a_damaged_one": 4,
    "test_around_the_block": 12,
    "test_damage_is_named_and_an_older_checkpoint_taken": 8,
    "test_digest_made_on_a_device_tells_every_bit_and_place": 1,
    "test_files_that_lead_elsewhere_or_lie_are_refused": 6,
    "test_folder_is_the_one_save_pretrained_writes": 20,
    "test_leaves_that_lead_elsewhere_or_nowhere_are_refused": 6,
    "test_models_that_transformers_converts_get_it_back": 10,
    "test_names_that_the_terminal_cannot_show_end_no_command": 4,
    "test_no_older_one_is_chosen": 12,
    "test_resumed_after_any_batch_a_run_goes_on_exactly": 12,
    "test_resumed_twice": 6,
    "test_rewritten_by_the_hdf5_library_it_is_still_read": 4,
    "test_the_hdf5_library_reads_equal_values": 20,
    "test_the_logits_are_those_of_the_adapter": 3,
    "test_there_and_back_through_every_pair": 10,
    "test_weights_that_were_not_replaced": 4,
    "test_what_goes_on_failing_is_an_error_of_ours": 12,
}


@pytest.hookimpl(tryfirst=True)  # before -m selects by the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the files, mark what only --all runs, and skip tests that need an accelerator where there is none."""
    idle = {(file, part) for file in {Path(item.path).stem for item in items} for part in ONLY_IN_ALL.get(file, ())}
    for item in items:
        file = Path(item.path).stem
        names = (item.name, *getattr(item, "fixturenames", ()))
        parts = [part for part in ONLY_IN_ALL.get(file, ()) if any(part in name for name in names)]
        idle.difference_update((file, part) for part in parts)
        if parts:
            item.add_marker(pytest.mark.slow)
    _mark_rest_of_families(items)
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(_SECONDS_OF_SLOW_TESTS))
    if idle and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"ONLY_IN_ALL in {__file__} names cases that no test has: {sorted(idle)}")
    places = {name: place for place, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: places.get(Path(item.path).stem, len(places)))
    marked = [item for item in items if item.get_closest_marker("accelerator")]
    if marked and not torch.accelerator.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no accelerator here"))


def _mark_rest_of_families(items: list[pytest.Item]) -> None:
    """Mark all but a sample of each family of SAMPLED."""
    families: dict[str, list[pytest.Item]] = {}
    for item in items:
        name = getattr(item, "originalname", "")
        if name in SAMPLED and not item.get_closest_marker("slow"):
            families.setdefault(f"{item.path} {name}", []).append(item)
    for family in families.values():
        name = getattr(family[0], "originalname", "")
        kept = random.Random(name).sample(range(len(family)), min(SAMPLED[name], len(family)))
        for number in set(range(len(family))) - set(kept):
            family[number].add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def _spread_folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Have ext4 put each test's folder into another block group: in a full one it searches past all deleted files."""
    with suppress(FileNotFoundError):  # not Linux
        subprocess.run(["chattr", "+T", tmp_path_factory.getbasetemp()], stderr=subprocess.DEVNULL, check=False)


@pytest.fixture(autouse=True)
def _end_loader_workers() -> Iterator[None]:
    """End the workers of loaders that a test leaves in a cycle, with the traceback of an error for example.

    The garbage collector ends their queues first, and then waits five seconds for each worker.
    """
    yield
    if multiprocessing.active_children():
        for each in gc.get_objects():
            if end := getattr(type(each), "_shutdown_workers", None):
                end(each)


@pytest.fixture
def s3() -> Iterator[S3]:
    """An S3 server on loopback with an empty bucket, s3://bucket, see tests/helpers/s3_server.py."""
    pytest.importorskip("obstore")
    with running_s3() as server:
        yield server


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of faulty.c, for LD_PRELOAD: calls to the disk fail, or end their process."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C compiler, and a loader that takes LD_PRELOAD")
    library = tmp_path_factory.mktemp("faulty") / "faulty.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-w", "-o", library, HELPERS / "faulty.c", "-ldl"], check=True)
    return library
