"""Damaged inputs of every kind, by the hundred: the process lives, within bounded time and memory,
and errors are ours.

Run by hand: `FT_CKPT_SEED=5 pytest tests/formats/test_mutations.py`; what fails is named with its
number, and `python tests/formats/test_mutations.py GROUP SEED N N+1 FOLDER` is that one alone: a
process of its own, which an input may end. It prints "begin GROUP/N" before each input, then "end"
with its outcome and seconds: "whole", "refused", "memory" (refused for lack of it), or "foreign"
with the error, or with the time it took. An input that ends the process, or takes over STEP_SECONDS
of CPU time, is the last that began.
"""

import json
import os
import pickle
import random
import resource
import struct
import subprocess
import sys
import time
import warnings
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from places import TESTS, python_path
from seeds import chosen_seed

from ft_ckpt import load, save
from ft_ckpt.checkpoint.manifest import Manifest, PartRecord
from ft_ckpt.errors import CheckpointError
from ft_ckpt.extensions.tools.converting import open_source
from ft_ckpt.formats import TensorRecord
from ft_ckpt.formats.files import pickles as pickles_module
from ft_ckpt.formats.index import file_index
from ft_ckpt.formats.trees import decode_node, unflatten
from ft_ckpt.runs.state import FOLDER, read_document
from ft_ckpt.saving.planning import STATE_DOCUMENT
from ft_ckpt.schedule import History
from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage.places import open_place

LIBRARIES = TESTS / "golden/libraries"
STEP_SECONDS = 10
WAIT_SECONDS = 100  # wall time, on a machine that may be busy
MOST_BYTES = 1 << 30
ODD = [
    *(None, True, -1, 0, 1 << 31, 1 << 40, 1 << 62, 1 << 70, 1e999, -0.5, "", "x", "\ud800"),
    *([], {}, [[]], ["tensor", -1], ["tensor", 1 << 40], {"a": []}),
]


def flat():
    torch.manual_seed(0)
    return {
        "w": torch.randn(30, 20),
        "b": torch.ones(3).to(torch.bfloat16),
        "big": torch.zeros(70_000, dtype=torch.int16),
    }


def nested():
    return {
        "model": flat(),
        "list": [1, 2.5, "x", None, b"raw", 1j, np.arange(3)],
        5: (torch.ones(2),),
        "z": b"y" * 5000,
    }


def mutated(content, dice):
    """`content` with flipped bits, other numbers, a piece of itself elsewhere, or cut short."""
    data = bytearray(content)
    for _ in range(dice.choice([1, 1, 2, 8])):
        way, at = dice.randrange(4), dice.randrange(len(data))
        if dice.random() < 0.7:  # where headers and footers are
            at = dice.choice([at % 2048, len(data) - 1 - at % 2048]) % len(data)
        if way == 0:
            data[at] ^= 1 << dice.randrange(8)
        elif way == 1:
            number = dice.choice(
                [0, 1, 0xFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 40, (1 << 63) - 1, (1 << 64) - 1]
            )
            data[at : at + 8] = struct.pack(dice.choice("<>") + "Q", number)[
                : len(data[at : at + 8])
            ]
        elif way == 2:
            size, source = dice.randrange(1, 64), dice.randrange(len(data))
            data[at : at + size] = data[source : source + size]
        else:
            data[at] = dice.randrange(256)
    return bytes(data[: dice.randrange(len(data))] if dice.random() < 0.1 else data)


def odd(document, dice):
    """`document` with a few of its values replaced."""
    document = json.loads(json.dumps(document))
    for _ in range(dice.choice([1, 1, 2, 5])):
        places, stack = [], [document]
        while stack:
            one = stack.pop()
            for key in one if isinstance(one, dict) else range(len(one)):
                places.append((one, key))
                if isinstance(one[key], (dict, list)):
                    stack.append(one[key])
        holder, key = dice.choice(places) if places else ({}, "")
        if isinstance(holder, dict) and dice.random() < 0.2:
            holder.pop(key, None)
        else:
            other, name = dice.choice(places) if places else ({"": 0}, "")
            holder[key] = json.loads(
                json.dumps(
                    dice.choice([*ODD, other.get(name) if isinstance(other, dict) else other[name]])
                )
            )
    return document


def use(found):
    """Touch every value."""
    if isinstance(found, torch.Tensor):
        found.clone()
    elif isinstance(found, dict):
        for value in found.values():
            use(value)
    elif isinstance(found, (list, tuple)):
        for value in found:
            use(value)


def both(path):
    """Read as an object, and as the source of a conversion."""
    with ExitStack() as stack:  # all are tried, and the last error is raised
        for read in (
            lambda: use(load(path)),
            lambda: use(load(path, map_location="cpu")),
            lambda: tensors(path),
        ):
            stack.callback(read)


def tensors(path):
    file = open_source(open_place(path))
    try:
        for name in file.specs:
            file.read(name)
    finally:
        file.close()


def on_file(make, name, read=both):
    def prepare(folder):
        make(folder / name)
        content = (folder / name).read_bytes()

        def attempt(dice):
            (folder / name).unlink()
            (folder / name).write_bytes(mutated(content, dice))
            read(folder / name)

        return attempt

    return prepare


def in_folder(make, read=tensors):
    def prepare(folder):
        make(folder)
        contents = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}

        def attempt(dice):
            hit = dice.choice(sorted(contents))
            for path, content in contents.items():
                path.unlink(missing_ok=True)
                path.write_bytes(mutated(content, dice) if path == hit else content)
            read(folder)

        return attempt

    return prepare


def golden(name):
    """A file that another library wrote."""
    return on_file(lambda path: path.write_bytes((LIBRARIES / name).read_bytes()), name)


def crafted_index(folder):
    """A file of ours with a mutated index under a valid digest."""
    save(nested(), folder / "x.h5")
    content = (folder / "x.h5").read_bytes()
    _, data_start, start, *_ = struct.unpack(file_index._FOOTER, content[-64:-8])
    text = json.loads(content[start:-64])

    def attempt(dice):
        index = json.dumps(odd(text, dice)).encode()
        end = file_index.index_footer(index, data_start, start, start + len(index) + 64)
        (folder / "x.h5").unlink()
        (folder / "x.h5").write_bytes(content[:start] + index + end)
        both(folder / "x.h5")

    return attempt


def crafted_header(folder):
    """A safetensors file with a mutated header."""
    save(nested(), folder / "x.safetensors")
    content = (folder / "x.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    head = json.loads(content[8 : 8 + size])

    def attempt(dice):
        text = json.dumps(odd(head, dice)).encode()
        (folder / "x.safetensors").unlink()
        (folder / "x.safetensors").write_bytes(
            len(text).to_bytes(8, "little") + text + content[8 + size :]
        )
        both(folder / "x.safetensors")

    return attempt


def moved(path):
    """A file of ours whose index is not trusted, so that the HDF5 library reads the damage."""
    save(nested(), path)
    path.write_bytes(path.read_bytes() + b"x")


def cerebras(path):
    save(nested(), path)
    with h5py.File(path, "r+") as file:
        del file["__ft_index__"]


def foreign(path):
    import hdf5plugin

    noise = np.random.default_rng(0).integers(0, 99, (300, 20)).astype("f4")
    kinds = {
        "gzip": {"compression": "gzip", "shuffle": True},
        "lzf": {"compression": "lzf", "fletcher32": True},
        "bits": hdf5plugin.Bitshuffle(cname="lz4"),
        "lz4": hdf5plugin.LZ4(),
        "zstd": hdf5plugin.Zstd(),
        "plain": {},
    }
    with h5py.File(path, "w") as file:
        for name, options in kinds.items():
            file.create_dataset(f"g/{name}", data=noise, chunks=(50, 20), **options)
        file["text"], file["words"], file["big"] = "hello", ["a", "b"], np.arange(5.0, dtype=">f8")
        file["soft"], file["never"] = h5py.SoftLink("/g/gzip"), np.float32(1)
        file.create_dataset("unwritten", (100, 10), "f4", chunks=(10, 10))


def legacy_hdf5(path):
    """Format 0.4 of Cerebras, of one list."""
    names = ("torch.utils._pytree", "TreeSpec"), ("torch.utils._pytree", "LeafSpec")
    new = lambda module, name: b"c" + module.encode() + b"\n" + name.encode() + b"\n)\x81"  # noqa: E731
    leaf = (
        new(*names[1])
        + b"}(X\x04\x00\x00\x00typeNX\x07\x00\x00\x00contextNX\x0e\x00\x00\x00children_specs]ub"
    )
    kind = b"cdill._dill\n_load_type\nX\x04\x00\x00\x00list\x85R"
    spec = (
        b"\x80\x02"
        + new(*names[0])
        + b"}(X\x04\x00\x00\x00type"
        + kind
        + b"X\x07\x00\x00\x00contextN"
    )
    spec += b"X\x0e\x00\x00\x00children_specs](" + leaf * 3 + b"eub."
    with h5py.File(path, "w") as file:
        file.attrs["__version__"], file.attrs["__spec__"] = 0.4, spec.hex()
        weight = file.create_dataset(
            "0", data=np.arange(500, dtype="i2"), chunks=(100,), compression="gzip"
        )
        weight.attrs["__H5_TYPE__"], weight.attrs["is_bfloat16"] = "TorchTensorH5Type", True
        file.create_dataset("1", data=2.5).attrs["__H5_TYPE__"] = "ScalarH5Type"
        last = file.create_dataset("2", dtype="f4")
        last.attrs["__H5_TYPE__"], last.attrs["object_value"] = (
            "ObjectH5Type",
            pickle.dumps(1j).hex(),
        )
    use(load(path))


def dcp(folder):
    torch_dcp.save(flat(), checkpoint_id=folder, no_dist=True)


def document(folder):
    """The document of a run's state."""
    tree = {"tree": ["list", {"a": ["tensor", 0]}, ["array", 1, "<f4", [2, 2]]], "tensors": 2}
    whole = {
        "version": 1,
        "items": {"scheduler": tree},
        "ranks": [{"rng": tree}],
        "weights": {"w": ["", "w"]},
        "run_id": "abc",
        "progress": {"step": 4, "epoch": 1, "batch": 0, "samples": 0},
        "fingerprint": {},
        "history": History().to_json(),
    }
    names = {
        "": ["w"],
        FOLDER: [f"{item}/{number}" for item in ("scheduler", "rank-0/rng") for number in range(2)],
    }
    parts = [
        PartRecord(
            "",
            path,
            "state",
            "",
            "",
            tuple(TensorRecord(name, (2, 2), "float32", "f", 0, 0) for name in some),
        )
        for path, some in names.items()
    ]
    manifest = Manifest(tuple(parts), (), "state", "", 4, run_id="abc")
    (folder / FOLDER).mkdir()
    text = json.dumps(whole).encode()

    def attempt(dice):
        data = mutated(text, dice) if dice.random() < 0.3 else json.dumps(odd(whole, dice)).encode()
        (folder / STATE_DOCUMENT).write_bytes(data)
        found = read_document(LocalStore(folder), manifest)
        for entry in found["ranks"][0].values():
            grow(entry["tree"])

    return attempt


def grow(tree):
    return unflatten(decode_node(tree), lambda _: torch.ones(2, 2), lambda _: np.ones((2, 2), "f4"))


def trees(folder):
    from ft_ckpt.formats.trees import encode_node, flatten

    whole = encode_node(flatten(nested(), ["float32", "bfloat16", "int16"])[0])

    def attempt(dice):
        grow(odd([whole], dice)[0])

    return attempt


def pickles(folder):
    values = [
        {"a": [1, (2,)]},
        torch.float16,
        np.float32(2.5),
        frozenset({1, "a"}),
        [{"x": ("y",) * 3}] * 4,
        2**100,
    ]
    data = [pickle.dumps(value, protocol) for value in values for protocol in (0, 2, 4)]

    def attempt(dice):
        pickles_module.unpickle(mutated(dice.choice(data), dice), "data")

    return attempt


GROUPS = {
    "safetensors": on_file(lambda path: save(nested(), path), "x.safetensors"),
    "safetensors header": crafted_header,
    "dual": on_file(lambda path: save(nested(), path, "dual"), "x.safetensors"),
    "hdf5": on_file(lambda path: save(nested(), path), "x.h5"),
    "hdf5 compressed": on_file(lambda path: save(flat(), path, compression="gzip"), "x.h5"),
    "hdf5 index": crafted_index,
    "hdf5 moved": on_file(moved, "x.h5"),
    "hdf5 foreign": on_file(foreign, "x.h5"),
    "cerebras 0.5": on_file(cerebras, "x.h5"),
    "cerebras 0.4": on_file(legacy_hdf5, "x.h5"),
    "torch": on_file(
        lambda path: torch.save(
            nested()["model"] | {"n": [1, (2, {})], "t": torch.ones(6, 4).t()}, path
        ),
        "x.pt",
    ),
    "torch legacy": on_file(
        lambda path: torch.save(flat(), path, _use_new_zipfile_serialization=False), "x.pt"
    ),
    "keras": golden("keras.keras"),
    "keras hdf5": golden("bfloat16.h5"),
    "flax": golden("flax.msgpack"),
    "flax pieces": golden("pieces.msgpack"),
    "lightning": golden("lightning.ckpt"),
    "pickle": pickles,
    "dcp": in_folder(dcp),
    "document": document,
    "tree": trees,
}


def outcome(attempt, dice):
    begun = time.monotonic()
    try:
        attempt(dice)
        found = "whole"
    except CheckpointError as error:
        found = "memory" if _is_memory(error) else "refused"
    except Exception as error:
        found = f"foreign {type(error).__name__}: {str(error)[:300]!r}"
    took = time.monotonic() - begun
    if took > WAIT_SECONDS:
        found = f"foreign {took:.0f} s: {found}"
    return f"{found} in {took:.1f} s"


def _is_memory(error):
    while error is not None:
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def main(groups, seed, first, count, folder):
    warnings.simplefilter("ignore")
    for group in groups.split(","):
        (place := Path(folder) / group).mkdir(parents=True, exist_ok=True)
        run(group, GROUPS[group](place), seed, range(int(first), int(count)))


def run(group, attempt, seed, numbers):
    used = resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_BYTES, resource.RLIM_INFINITY))
    for number in numbers:
        spent = resource.getrusage(resource.RUSAGE_SELF)
        step = int(spent.ru_utime + spent.ru_stime) + 1 + STEP_SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (step, resource.RLIM_INFINITY))
        print(f"\nbegin {group}/{number}", flush=True)
        print(f"\nend {outcome(attempt, random.Random(f'{seed}/{group}/{number}'))}", flush=True)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)


# The tests


# The HDF5 library reads the damage, which may end the process, or take time or memory:
# docs/limits.md.
LIBRARY = [
    group
    for group in GROUPS
    if group.startswith(("cerebras", "keras"))
    or group in ("hdf5 moved", "hdf5 foreign", "hdf5 compressed")
]
OURS = [group for group in GROUPS if group not in LIBRARY]
# torch reads it whole, and may be asked for more memory than there is: docs/limits.md.
READ_BY_TORCH = ["torch legacy"]
ENDS = 3  # of processes, at which a group is given up


def campaign(groups, first, end, folder):
    """What came of each input, counted by group; and those that ended the process, or whose errors
    were not ours.
    """
    command = [
        sys.executable,
        __file__,
        ",".join(groups),
        str(chosen_seed()),
        str(first),
        str(end),
        str(folder),
    ]
    environment = {**os.environ, "PYTHONPATH": python_path()}
    run = subprocess.run(
        command, capture_output=True, text=True, errors="replace", check=False, env=environment
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith(("begin ", "end "))]
    pairs = [(lines[at][6:], lines[at + 1][4:]) for at in range(0, len(lines) - 1, 2)]
    told = Counter((name.partition("/")[0], found.partition(" ")[0]) for name, found in pairs)
    wrong = [f"{name}: {found}" for name, found in pairs if found.startswith("foreign")]
    last = int(lines[-1 if len(lines) % 2 else -2].rpartition("/")[2]) if lines else end
    ended = lines[-1].partition("/")[0].removeprefix("begin ") if lines else groups[0]
    if run.returncode and not (run.returncode < 0 and ended in LIBRARY):
        wrong.append(
            f"{lines[-1] if lines else groups}: ended with {run.returncode}\n{run.stderr[-2000:]}"
        )
    return told, wrong, last


def check(groups, told, wrong, count):
    print(dict(told))
    assert not wrong, wrong
    may_be_hungry = [*LIBRARY, *READ_BY_TORCH]
    hungry = [group for group in groups if told[group, "memory"] and group not in may_be_hungry]
    assert not hungry, "refused only for want of memory"
    assert not [group for group in groups if told[group, "refused"] <= count // 20]


@pytest.mark.sample("ours")
@pytest.mark.parametrize(("groups", "count"), [(OURS, 5), (LIBRARY, 5)], ids=["ours", "library"])
def test_damaged_input_is_refused_in_so_many_words(groups, count, tmp_path):
    told, wrong, _ = campaign(groups, 0, count, tmp_path)
    check([], told, wrong, count)
    assert sum(number for (_, how), number in told.items() if how == "refused") > told.total() // 4


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_hundreds_of_damaged_inputs(group, tmp_path):
    count = 2000
    told, wrong, first = Counter(), [], 0
    while first < count and len(wrong) < ENDS:
        more, bad, last = campaign([group], first, count, tmp_path)
        told, wrong, first = told + more, wrong + bad, last + 1
    check([group], told, wrong, count)


if __name__ == "__main__":
    main(*sys.argv[1:])
