"""A disk that fails at any one call of a save: the error is ours, the older one whole, and nothing left after the next.

And at any one call of a read: what comes out is the right values, or one of our errors.

By default one fault of each of two saves, which FT_CKPT_SEED chooses; the slow tests try all.
"""

import json
import os
import random
import subprocess
import sys

import models
import pytest
import torch
from places import WORKERS, python_path
from seeds import chosen_seed, examples

from ft_ckpt import CheckpointSaver, verify
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME
from ft_ckpt.errors import ManifestError

ALL = ["full", "h5", "background", "direct", "prune", "pin", ".safetensors", ".pt", ".h5 compressed"]
ALL += ["convert to h5", "convert to a file"]
SOME = ["full", "prune"]
READS = ["load_model", "load_model verified", "adapter", "resume", "verify", "latest", "discover", "copy"]
READS += [".safetensors", ".safetensors now", ".pt", ".h5", ".h5 compressed"]


def campaign(shim, root, cases, most, worker="faulty.py"):
    seed = chosen_seed()
    asked = json.dumps({"root": str(root), "cases": cases, "most": most, "seed": seed})
    environment = {**os.environ, "LD_PRELOAD": str(shim), "PYTHONPATH": python_path()}
    command = [sys.executable, WORKERS / worker, asked]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"seed {seed}: {found['tried']}")
    assert found["wrong"] == [], "\n".join([f"seed {seed}", *found["wrong"][:20]])


def test_some_faults_of_saves(shim, tmp_path):
    campaign(shim, tmp_path, SOME, 1)


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL)
def test_every_fault(shim, tmp_path, case):
    campaign(shim, tmp_path, [case], 0)


@pytest.mark.slow
@pytest.mark.parametrize("case", READS)
def test_every_fault_of_a_read(shim, tmp_path, case):
    campaign(shim, tmp_path, [case], 0, "faulty_reads.py")


def saved_kinds(root):
    """A checkpoint of each kind there is, as (name, folder)."""
    model, run = models.lora(), models.gpt2()
    optimizer = torch.optim.AdamW(run.parameters())
    run(**models.batch(0)).loss.backward()
    optimizer.step()
    with CheckpointSaver() as saver:
        saver.save(models.llama(), root / "sharded", step=1, max_shard_size=20_000)
        saver.save(model, root / "adapter", adapter_only=True)
        saver.save(models.policy_and_value(), root / "parts", attribute=["policy", "value_head"])
    for form, options in (("h5", {}), ("dual", {}), ("h5", {"compression": "gzip"})):
        with CheckpointSaver(format=form, **options) as saver:
            saver.save(models.llama(), root / f"{form}{'-'.join(options)}")
    with CheckpointSaver(None, root / "run") as saver:
        saver.register(model=run, optimizer=optimizer)
        saver.save_state(run)
    return sorted(path.parent for path in root.rglob(MANIFEST_NAME))


def flips(root, count):
    """Flip one bit after another anywhere in the checkpoints, and ask for each whether it is found."""
    seed = chosen_seed()
    chances, missed = random.Random(seed), []
    files = [file for folder in saved_kinds(root) for file in folder.rglob("*") if file.is_file()]
    folders = {file: next(each for each in file.parents if (each / MANIFEST_NAME).exists()) for file in files}
    for _ in range(count):
        file = chances.choice(files)
        place, bit = chances.randrange(file.stat().st_size), chances.randrange(8)
        flip(file, place, bit)
        if is_whole(folders[file]):
            missed.append(f"{file.relative_to(root)}: bit {bit} of byte {place}")
        flip(file, place, bit)
    assert missed == []
    assert all(is_whole(folder) for folder in set(folders.values()))


def flip(file, place, bit):
    with file.open("r+b", buffering=0) as stream:
        stream.seek(place)
        (byte,) = stream.read(1)
        stream.seek(place)
        stream.write(bytes([byte ^ 1 << bit]))


def is_whole(folder):
    try:
        report = verify(folder)
        return report.ok and not report.notes  # a changed model card is a note
    except ManifestError:
        return False


def test_a_flipped_bit_is_found(tmp_path):
    flips(tmp_path, examples(100))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_thousand_flipped_bits_are_found(tmp_path):
    flips(tmp_path, 1000)
