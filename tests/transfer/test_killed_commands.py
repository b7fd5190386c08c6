"""Commands killed at every call that changes the disk, and at every request to a bucket, with
readers beside them.

The old checkpoint is whole, or the new one, and the next call of the same command leaves what an
undisturbed one does.
"""

import os
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from command_trials import CommandTrials
from faults import KILLS, Server, try_worlds
from hub_server import serving_hub, using_hub
from preloaded import Preloaded, System
from s3_server import running_s3
from small_checkpoints import (
    contents,
    make_checkpoint,
    manifest_of,
    save_with_state,
    write_safetensors,
)

import ft_ckpt
from ft_ckpt import Keep
from ft_ckpt.checkpoint.commit import delete_state, open_staging
from ft_ckpt.checkpoint.manifest import PartRecord
from ft_ckpt.errors import TargetError
from ft_ckpt.extensions.buckets import uploads
from ft_ckpt.extensions.rl.deltas import append_checkpoint, drop_rebuilt, mark_staged
from ft_ckpt.extensions.transfer.copies import store_copies as copies
from ft_ckpt.runs.folder import prune_run
from ft_ckpt.storage import local_disk
from ft_ckpt.storage.places import copies as copying, open_place

LOADED = (
    "obstore",
    "ft_ckpt.extensions.tools.averaging.averages",
    "ft_ckpt.extensions.transfer.sending.syncing",
    "ft_ckpt.extensions.transfer.endpoints.stores",
)
LOADED_FOR_ALL = (
    *LOADED,
    "models",
    "deepspeed",
    "ft_ckpt.extensions.tools.merging.merge_files",
    "ft_ckpt.extensions.transfer.hub.repositories",
)
LARGE_BYTES = 40 << 10  # of a file that is not copied in one call


# Initial states of a folder and of the place to write to, `there`, which is a folder or a URL


def checkpoint(target, step, *, fill=0, **facts):
    """A checkpoint of a run with a state, and a large file that all of them have."""
    staging = open_staging(target)
    (staging.stage / "frozen.bin").write_bytes(b"f" * LARGE_BYTES)
    parts = list(make_checkpoint(staging.stage, step=fill or step).parts)
    (staging.stage / "state").mkdir()
    records = write_safetensors(
        staging.stage / "state" / "rank-0.safetensors", ["m"], step, "state/rank-0.safetensors"
    )
    parts.append(PartRecord("state", "state", "state", "safetensors", "", tuple(records)))
    facts = {"run_id": "r", "created": f"2026-01-01T00:00:{step:02}+00:00", **facts}
    staging.commit(replace(manifest_of(staging.stage, parts, step), **facts))


def run_of_two(root, _there):
    for step in (1, 2):
        checkpoint(root / "run" / f"checkpoint-{step}", step)


def two_of_one_model(root, _there):
    """Two steps with equal configs, which have an average; the test's own config holds the step."""
    for step in (1, 2):
        checkpoint(root / "run" / f"checkpoint-{step}", step, fill=1)


def one_model_there(root, there):
    two_of_one_model(root, there)
    ft_ckpt.copy(root / "run" / "checkpoint-1", f"{there}/out")


def four_there(root, there):
    for step in (1, 2, 3, 4):
        checkpoint(root / "four" / f"checkpoint-{step}", step)
    ft_ckpt.sync(root / "four", there)


def some_there(root, there):
    """At the destination: another run, an older save of a checkpoint, a checkpoint too many, and a
    state too many.
    """
    for step in (2, 3, 9):
        checkpoint(root / "run" / f"checkpoint-{step}", step, fill=step + 10 * (step == 2))
    ft_ckpt.sync(root / "run", there)
    checkpoint(root / "others" / "other-7", 7, run_id="other")
    ft_ckpt.sync(root / "others", there)
    checkpoint(root / "run" / "checkpoint-2", 2, created="2026-01-02T00:00:00+00:00")
    delete_state(root / "run" / "checkpoint-3")
    (root / "run" / "checkpoint-9").rename(root / "checkpoint-9")


def one_there(root, there):
    """A checkpoint to be overwritten; on a disk, with a foreign file in its folder."""
    run_of_two(root, there)
    ft_ckpt.copy(root / "run" / "checkpoint-1", f"{there}/out")
    if "://" not in there:
        Path(there, "out", "notes.txt").write_text("mine")


def file_there(root, there):
    run_of_two(root, there)
    ft_ckpt.convert(root / "run" / "checkpoint-1", f"{there}/out.safetensors", progress=False)


def run_there(root, there):
    run_of_two(root, there)
    ft_ckpt.sync(root / "run", f"{there}/run")


def adapter(root, there):
    import models

    torch.manual_seed(0)
    base = models.build("qwen3")
    base.save_pretrained(root / "base")
    models.lora(base).save_pretrained(root / "adapter")


def adapter_and_one_there(root, there):
    adapter(root, there)
    one_there(root, there)


def nothing(root, there):
    (root / "mine.txt").write_text("mine")


# Commands


def raise_first(problems):
    for problem in problems:
        raise TargetError(problem)


def sync(root, there, **more):
    raise_first(ft_ckpt.sync(root / "run", there, **more).problems)


def prune(root, there):
    raise_first(prune_run(open_place(there), Keep(last=2, state=Keep(last=1))).problems)


def copy(root, there, **more):
    ft_ckpt.copy(root / "run" / "checkpoint-2", f"{there}/out", **more)


def convert(root, there, name="out", **more):
    ft_ckpt.convert(root / "run" / "checkpoint-2", f"{there}/{name}", progress=False, **more)


def average(root, there, **more):
    ft_ckpt.average(
        [root / "run" / f"checkpoint-{step}" for step in (1, 2)],
        f"{there}/out",
        progress=False,
        **more,
    )


def merge(root, there, **more):
    ft_ckpt.merge(root / "adapter", f"{there}/out", base=root / "base", progress=False, **more)


def push(root, there):
    ft_ckpt.push(root / "run" / "checkpoint-2", f"{there}/out")


def pull(root, there):
    ft_ckpt.pull(f"{there}/run/checkpoint-2", root / "pulled")


def pull_to_cache(root, there):
    os.environ["FT_CKPT_CACHE"] = str(root / "cache")
    ft_ckpt.pull(f"{there}/run/checkpoint-2")


def pull_from_hub(root, there, name="base"):
    with using_hub(SimpleNamespace(url=os.environ["HUB_OF_TESTS"])):
        ft_ckpt.pull(f"hf://org/{name}", root / "pulled")


def chain_of_one(root, there):
    run_of_two(root, there)
    append(root, there, 1)


def append(root, there, step=2):
    append_checkpoint(
        open_place(root / "run" / f"checkpoint-{step}"), open_place(f"{there}/chain"), 10
    )


def chain_of_two(root, there):
    chain_of_one(root, there)
    append(root, there)
    ft_ckpt.pull(open_place(f"{there}/chain/checkpoint-1"), root / "stage/checkpoint-1")


def rebuild(root, there):
    ft_ckpt.pull(
        open_place(f"{there}/chain/checkpoint-2"), root / "stage/checkpoint-2", overwrite=True
    )


def two_rebuilt(root, there):
    chain_of_two(root, there)
    rebuild(root, there)
    for step in (1, 2):
        mark_staged(root / f"stage/checkpoint-{step}")


def drop_older(root, there):
    drop_rebuilt(open_place(f"{there}/chain"), root / "stage", keep=1)


def copy_within(root, there):
    ft_ckpt.copy(f"{there}/run/checkpoint-2", f"{there}/out")


COMMANDS = {
    "sync": (run_of_two, sync),
    "sync --delete": (some_there, partial(sync, delete=True)),
    "prune": (four_there, prune),
    "cp": (run_of_two, copy),
    "cp --overwrite": (one_there, partial(copy, overwrite=True)),
    "convert": (run_of_two, convert),
    "convert --overwrite": (one_there, partial(convert, overwrite=True, format="h5")),
    "convert to a file": (run_of_two, partial(convert, name="out.pt")),
    "convert over a file": (file_there, partial(convert, name="out.safetensors")),
    "average": (two_of_one_model, average),
    "average --overwrite": (one_model_there, partial(average, overwrite=True)),
    "merge": (adapter, merge),
    "merge --overwrite": (adapter_and_one_there, partial(merge, overwrite=True)),
    "push": (run_of_two, push),
    "pull": (run_there, pull),
    "pull to the cache": (run_there, pull_to_cache),
    "append": (chain_of_one, append),
    "rebuild": (chain_of_two, rebuild),
    "drop rebuilt": (two_rebuilt, drop_older),
    "cp within a bucket": (run_there, copy_within),
    "pull from the Hub": (nothing, pull_from_hub),
    "pull a checkpoint from the Hub": (nothing, partial(pull_from_hub, name="checkpoint")),
}


def act(root, command, step, there, environment):
    """Prepare (`step` 0) or run (1) the command."""
    os.environ.update(environment)
    tempfile.tempdir = str(root / "tmp")
    Path(tempfile.tempdir).mkdir(exist_ok=True)
    local_disk.fsync = lambda _: None  # no power is cut: spare the disk
    copies.SMALL_COPY_BYTES = copying.SMALL_COPY_BYTES = copies._MIN_REUSED_BYTES = LARGE_BYTES // 2
    uploads._PART_BYTES = 5 << 20
    COMMANDS[command][step](root, there)


# The campaigns


EVERYWHERE = [
    "sync",
    "sync --delete",
    "prune",
    "cp",
    "cp --overwrite",
    "convert",
    "convert --overwrite",
]
EVERYWHERE += [
    "convert to a file",
    "convert over a file",
    "average",
    "average --overwrite",
]
EVERYWHERE += ["append", "rebuild", "drop rebuilt"]
MERGES = ["merge", "merge --overwrite"]
OF_BUCKETS = ["push", "pull", "pull to the cache", "cp within a bucket"]
OF_HUB = ["pull from the Hub", "pull a checkpoint from the Hub"]
ALL = [(command, place) for command in (*EVERYWHERE, *MERGES) for place in ("folder", "bucket")]
ALL += [(command, "bucket") for command in OF_BUCKETS] + [(command, "folder") for command in OF_HUB]
SAMPLE = [
    ("sync --delete", "folder"),
    ("cp --overwrite", "bucket"),
    ("convert --overwrite", "folder"),
]
SAMPLE += [("append", "folder"), ("append", "bucket"), ("rebuild", "folder")]
MAX_SAMPLED = 6  # deaths of each in the sample


@pytest.fixture(scope="module")
def s3():
    pytest.importorskip("obstore")
    with running_s3() as server:
        yield server


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A Hub with a repository of files, and one with a checkpoint."""
    folder = tmp_path_factory.mktemp("hub") / "checkpoint"
    save_with_state(folder, 1)
    files = {
        name: content for name, content in contents(folder).items() if (folder / name).is_file()
    }
    with serving_hub() as server:
        server.put("org/checkpoint", files)
        server.put(
            "org/base",
            {
                "config.json": b"{}",
                "onnx/model.onnx": b"x" * 5000,
                "model.safetensors": b"y" * 70_000,
            },
        )
        yield server


@pytest.fixture(scope="module")
def preloaded(shim):
    process = Preloaded(shim, __file__, *LOADED)
    yield process
    process.close()


@pytest.fixture(scope="module")
def preloaded_for_all(shim):
    process = Preloaded(shim, __file__, *LOADED_FOR_ALL)
    yield process
    process.close()


def campaign(preloaded, s3, hub_url, folder, command, place, max_worlds=0):
    """Try all deaths of a command, or so many of them."""
    trials = CommandTrials(
        preloaded, act, s3, command, place == "bucket", folder, {"HUB_OF_TESTS": hub_url}
    )
    report = try_worlds(
        trials.trial, System(preloaded, "killed"), Server(s3, KILLS), max_worlds=max_worlds
    )
    assert report.met > report.missed


@pytest.mark.sample("convert --overwrite-folder", "append-bucket")
@pytest.mark.parametrize(("command", "place"), SAMPLE)
def test_commands_that_are_killed_are_finished_by_the_next_call(
    preloaded, s3, tmp_path, command, place
):
    campaign(preloaded, s3, "", tmp_path, command, place, MAX_SAMPLED)


@pytest.mark.slow
@pytest.mark.parametrize(("command", "place"), ALL)
def test_commands_that_are_killed_anywhere_are_finished_by_the_next_call(
    preloaded_for_all, s3, hub, tmp_path, command, place
):
    campaign(preloaded_for_all, s3, hub.url, tmp_path, command, place)
