"""Files of other libraries that are missing, cut, exchanged, or no files: refused, or read whole;
nothing hangs.

What fails is named. `python tests/formats/test_foreign_faults.py READERS SEED EACH FOLDER` converts
the sources of the READERS (names with commas between) with one fault each: EACH trials of every
reader, chosen by SEED, or all there are if EACH is 0. A process of its own does it, which a trial
may end.

It prints "begin READER FILE FAULT" before each trial and "end" with the outcome after it: "whole"
(the result equals that of the source without a fault), "refused", "changed" (other values, or
tensors missing), "indistinguishable" (changed, but the files cannot show it), or "foreign" with an
error that is not ours. A trial that takes over LIMIT_SECONDS ends the process.
"""

import importlib.util
import json
import os
import pickle
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import warnings
from collections import Counter
from functools import partial
from pathlib import Path

import h5py
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from places import TESTS, python_path
from safetensors.torch import load_file
from seeds import chosen_seed

from ft_ckpt import convert, save
from ft_ckpt.errors import CheckpointError

LIBRARIES = TESTS / "golden/libraries"
LIMIT_SECONDS = 60
MOST_BYTES = 4 << 30
LENGTHS = (1, 8, 0.3, 0.7, 0.99)  # that files are cut to: bytes, or shares of their size
FLIPS = 20  # of one bit each, in a file


def state(dtype=torch.float32):
    torch.manual_seed(0)
    names = ("a.weight", "b.weight", "c.bias", "d")
    return {name: torch.randn(30 + 5 * i, 20).to(dtype) for i, name in enumerate(names)}


# Sources: each makes its files in a folder and returns the one to convert


def file_of(name, write):
    def make(folder):
        write(folder / name)
        return folder / name

    return make


def golden(name):
    return file_of(name, lambda path: path.write_bytes((LIBRARIES / name).read_bytes()))


def golden_folder(name, inside="run"):
    def make(folder):
        shutil.copytree(LIBRARIES / name, folder / "run")
        return folder / inside

    return make


def lightning_file(path):
    torch.save({"pytorch-lightning_version": "2.6", "epoch": 1, "state_dict": state()}, path)


def foreign_hdf5(path):
    with h5py.File(path, "w") as file:
        for name, tensor in state().items():
            file.create_dataset(name, data=tensor.numpy(), chunks=(10, 20), compression="gzip")


def sharded(format_name, suffix):
    """A folder as of Hugging Face, with an index of shards."""

    def make(folder):
        save(state(), folder / "whole.safetensors")
        convert(
            folder / "whole.safetensors",
            folder / "run",
            format=format_name,
            max_shard_size=6000,
            progress=False,
        )
        (folder / "whole.safetensors").unlink()
        (folder / "run/ft_ckpt.json").unlink()
        assert len(list(folder.glob(f"run/*{suffix}"))) > 2
        return folder / "run"

    return make


def adapter(folder):
    (folder / "run").mkdir()
    (folder / "run/adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2}))
    save(state(), folder / "run/adapter_model.safetensors")
    return folder / "run"


def dcp(folder, prefix=""):
    writer = torch_dcp.FileSystemWriter(folder / "run", single_file_per_rank=False)
    tensors = {f"{prefix}{name}": tensor for name, tensor in state().items()}
    torch_dcp.save(tensors | {"step": 3}, storage_writer=writer, no_dist=True)
    assert len(list(folder.glob("run/*.distcp"))) > 2
    return folder / "run"


def sharded_lightning(folder):
    dcp(folder, "state_dict.")
    torch.save({"epoch": 1, "pytorch-lightning_version": "2.6.0"}, folder / "run/meta.pt")
    return folder / "run"


def chunked_orbax(folder):
    """As orbax writes it without a common store, each array in several chunks."""
    import tensorstore

    tree = {}
    for name, tensor in state().items():
        keys = name.split(".")
        tree[str(tuple(keys))] = {
            "key_metadata": [{"key": key, "key_type": 2} for key in keys],
            "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
        }
        spec = {
            "driver": "zarr",
            "kvstore": {"driver": "file", "path": f"{folder}/run/{name}/"},
            "metadata": {"shape": list(tensor.shape), "chunks": [10, 20], "dtype": "<f4"},
        }
        tensorstore.open(spec, create=True).result().write(tensor.numpy()).result()
    document = {
        "tree_metadata": tree,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
    }
    (folder / "run/_METADATA").write_text(json.dumps(document))
    return folder / "run"


def tensorflow(rules):
    def make(folder):
        save(state(), folder / "whole.safetensors")
        options = {}
        if rules:
            (folder / "rules").write_text("a* first\n* second\n")
            options = {"shards": folder / "rules"}
        convert(
            folder / "whole.safetensors",
            folder / "run",
            format="tensorflow",
            progress=False,
            **options,
        )
        for name in ("whole.safetensors", "rules", "run/ft_ckpt.json"):
            (folder / name).unlink(missing_ok=True)
        return folder / "run"

    return make


READERS = {
    "torch": file_of("x.pt", lambda path: torch.save(state(), path)),
    "torch legacy": file_of(
        "x.pt", lambda path: torch.save(state(), path, _use_new_zipfile_serialization=False)
    ),
    "lightning": file_of("x.ckpt", lightning_file),
    "safetensors": file_of("x.safetensors", lambda path: save(state(), path)),
    "dual": file_of("x.safetensors", lambda path: save(state(), path, "dual")),
    "hdf5": file_of("x.h5", lambda path: save(state(), path)),
    "hdf5 foreign": file_of("x.h5", foreign_hdf5),
    "keras": golden("keras.keras"),
    "keras weights": golden("keras.weights.h5"),
    "keras 2": golden("keras2.h5"),
    "flax": golden("flax.msgpack"),
    "flax pieces": golden("pieces.msgpack"),
    "sharded": sharded("safetensors", ".safetensors"),
    "sharded torch": sharded("torch", ".bin"),
    "adapter": adapter,
    "dcp": dcp,
    "lightning folder": sharded_lightning,
    "orbax": golden_folder("orbax"),
    "orbax folders": golden_folder("orbax_folders"),
    "orbax step": golden_folder("orbax_run", "run/3"),
    "orbax chunks": chunked_orbax,
    "tensorflow": tensorflow(False),
    "tensorflow shards": tensorflow(True),
}
# libraries, by the first word of a reader
NEEDED = {"orbax": "tensorstore", "tensorflow": "tensorflow"}
# These files do not identify themselves: one in the place of another cannot be detected.
EXCHANGEABLE = ("dcp", "lightning folder", "orbax folders", "orbax chunks")
# All relevant bytes of these are under checksums, except in files with the given ending.
SUMMED = {
    "torch": "",
    "lightning": "",
    "sharded torch": ".json",
    "dcp": ".metadata",
    "lightning folder": ".metadata",
    "keras": "",
    "tensorflow": "",
    "tensorflow shards": ".json",
}
# no links out of it are followed
IN_FOLDER_ONLY = ("dcp", "lightning folder", "orbax", "tensorflow")


def usable(name):
    library = NEEDED.get(name.partition(" ")[0])
    return library is None or importlib.util.find_spec(library) is not None


# Faults: each changes one file


def replace(path, content):
    path.unlink()
    path.write_bytes(content)


def cut(path, _other, size):
    os.truncate(path, size if type(size) is int else int(size * path.stat().st_size))


def flip(path, _other, number):
    dice, data = random.Random(f"{sys.argv[2]} {path.name} {number}"), bytearray(path.read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    replace(path, data)


def exchange(path, other):
    one, two = path.read_bytes(), other.read_bytes()
    replace(path, two)
    replace(other, one)


def put_socket(path, _other):
    path.unlink()
    here = Path.cwd()
    os.chdir(path.parent)  # the names of sockets are short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path.name)
    os.chdir(here)


def put_device(path, _other):
    path.unlink()
    os.mknod(path, 0o20644, os.makedev(1, 5))  # /dev/zero


def link(path, target):
    path.unlink()
    path.symlink_to(target)


def link_out(path, _other):
    outside = (
        path.parents[len(path.parts) - len(Path(sys.argv[4]).absolute().parts) - 2] / "outside"
    )
    outside.write_bytes(path.read_bytes())
    link(path, outside)


def next_name(path):
    """The name of a file of the next rank or shard."""
    numbers = [at for at, letter in enumerate(path.name) if letter.isdigit()]
    if not numbers:
        return path.with_name(f"{path.stem}-1{path.suffix}")
    at = numbers[0]
    return path.with_name(f"{path.name[:at]}{int(path.name[at]) + 7}{path.name[at + 1 :]}")


FAULTS = {
    "missing": lambda path, _: path.unlink(),
    "empty": lambda path, _: replace(path, b""),
    "zeros": lambda path, _: replace(path, bytes(path.stat().st_size)),
    "doubled": lambda path, _: replace(path, path.read_bytes() * 2),
    "exchanged": exchange,
    "another's": lambda path, other: replace(path, other.read_bytes()),
    "of another reader": lambda path, _: replace(path, pickle.dumps({"a": 1}) + bytes(3000)),
    "copied": lambda path, _: shutil.copy(path, next_name(path)),
    **{f"cut to {size}": partial(cut, size=size) for size in LENGTHS},
    **{f"flip {number}": partial(flip, number=number) for number in range(FLIPS)},
    "pipe": lambda path, _: (path.unlink(), os.mkfifo(path)),
    "device": put_device,
    "socket": put_socket,
    "folder": lambda path, _: (path.unlink(), path.mkdir()),
    "link to another": lambda path, other: link(path, other),
    "link to its copy": lambda path, _: (
        path.rename(path.with_name("copy")),
        path.symlink_to("copy"),
    ),
    "link out": link_out,
    "link to a device": lambda path, _: link(path, "/dev/zero"),
    "dangling link": lambda path, _: link(path, "nowhere"),
    "link to itself": lambda path, _: link(path, path.name),
}
WITH_ANOTHER = ("exchanged", "another's", "link to another")  # of the same folder


def trials(name, folder, each, dice):
    """(file, fault) of the trials of a reader."""
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    faults = [fault for fault in FAULTS if fault != "device" or os.geteuid() == 0]
    if len(files) == 1:
        faults = [fault for fault in faults if fault not in WITH_ANOTHER]
    pairs = [(file, fault) for file in files for fault in faults]
    return pairs if not each else dice.sample(pairs, min(each, len(pairs)))


def same(found, wanted):
    return found.keys() == wanted.keys() and all(
        found[name].dtype == one.dtype and torch.equal(found[name], one)
        for name, one in wanted.items()
    )


def converted(source, result):
    result.unlink(missing_ok=True)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_SECONDS)  # its signal ends the process
    try:
        convert(source, result, progress=False)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return load_file(result)


def judged(name, file, fault, outcome, is_needed):
    if (
        outcome == "whole"
        and fault == "link out"
        and name.startswith(IN_FOLDER_ONLY)
        and is_needed()
    ):
        return "foreign: read out of the folder"
    if name == "lightning folder" and fault == "missing":
        return "whole"  # without its `meta.pt`, it is a folder of torch.distributed.checkpoint
    allowed = fault in WITH_ANOTHER and name.startswith(EXCHANGEABLE)
    if fault.startswith("flip"):
        allowed = name not in SUMMED or (SUMMED[name] and file.endswith(SUMMED[name]))
    return "indistinguishable" if outcome == "changed" and allowed else outcome


def try_fault(name, source, folder, file, fault, truth, dice):
    """The outcome of converting `source`, in a copy of `folder`, with `fault` in `file`."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / file)
    other = dice.choice(files) if files else None
    if fault is not None:
        FAULTS[fault](folder / file, other)
    try:
        found = converted(source, folder.parent / "result.safetensors")

        def is_needed():
            (folder / file).unlink()
            return try_fault(name, source, folder, file, None, truth, dice) != "whole"

        return judged(
            name, file, fault or "", "whole" if same(found, truth) else "changed", is_needed
        )
    except CheckpointError:
        return "refused"
    except Exception as error:
        return f"foreign: {type(error).__name__}: {str(error)[:300]!r}"


def main(readers, seed, each, room):
    warnings.simplefilter("ignore")
    room = Path(room).absolute()
    for name in readers.split(","):
        if not usable(name):
            continue
        dice, whole = random.Random(f"{seed} {name}"), room / name / "whole"
        whole.mkdir(parents=True)
        source = READERS[name](whole)
        truth = converted(source, room / name / "truth.safetensors")
        used = resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (used + MOST_BYTES, resource.RLIM_INFINITY))
        for file, fault in trials(name, whole, int(each), dice):
            trial = room / name / "trial"
            shutil.rmtree(trial, ignore_errors=True)
            shutil.copytree(whole, trial)
            print(f"\nbegin {name} | {file} | {fault}", flush=True)
            outcome = try_fault(
                name, trial / source.relative_to(whole), trial, file, fault, truth, dice
            )
            print(f"\nend {outcome}".replace("\n", " ").replace(" ", "\n", 1), flush=True)


# The tests


def campaign(readers, each, folder):
    """The outcomes of the trials, counted, and those that are defects."""
    command = [
        sys.executable,
        __file__,
        ",".join(readers),
        str(chosen_seed()),
        str(each),
        str(folder),
    ]
    environment = {**os.environ, "PYTHONPATH": python_path()}
    run = subprocess.run(
        command, capture_output=True, text=True, errors="replace", check=False, env=environment
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith(("begin ", "end "))]
    pairs = list(zip(lines[::2], lines[1::2], strict=False))
    counts = Counter(found.split()[1].rstrip(":") for _, found in pairs)
    wrong = [
        f"{trial}: {found}"
        for trial, found in pairs
        if found.startswith(("end foreign", "end changed"))
    ]
    if run.returncode:
        wrong.append(
            f"{lines[-1] if lines else readers}: ended with {run.returncode}\n{run.stderr[-2000:]}"
        )
    print(dict(counts))
    return counts, wrong


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
def test_every_fault_in_every_file(reader, tmp_path):
    counts, wrong = campaign([reader], 0, tmp_path)
    if not counts and not wrong:
        pytest.skip("its library is not installed")
    assert not wrong, wrong
    assert counts["refused"]


if __name__ == "__main__":
    main(*sys.argv[1:5])
