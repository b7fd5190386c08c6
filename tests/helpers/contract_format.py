"""Contract tests of every format of `save` and `load`; a format's test class inherits them and
names its format.
"""

import os
import signal
import stat
import time
from contextlib import closing
from pathlib import Path
from typing import TextIO

import pytest
import torch
from buckets import in_bucket
from launch import run_and_signal, run_python

from ft_ckpt.errors import CorruptError, SelectionError, TargetError
from ft_ckpt.extensions.tools import load, save
from ft_ckpt.extensions.tools.converting import open_source
from ft_ckpt.formats import ITEM_BYTES
from ft_ckpt.storage.places import open_place

SAVE_FOREVER = """
import sys, torch
from ft_ckpt.extensions.tools.objects import save
path, kind = sys.argv[1:]
number = 1
while True:
    number += 1
    save({"number": torch.tensor(number), "big": torch.full((300_000,), number)}, path, kind)
    print(number, flush=True)
"""
SAVE_TOO_MUCH = """
import resource, sys, torch
from ft_ckpt.errors import NoSpaceError
from ft_ckpt.extensions.tools.objects import save
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    save({"number": torch.tensor(2), "big": torch.zeros(1 << 20)}, *sys.argv[1:])
except OSError as error:
    print(type(error).__name__, isinstance(error, NoSpaceError))
"""


def state() -> dict[str, torch.Tensor]:
    """A flat state dict that every format keeps: usual types, no elements, no dimensions, gaps
    between elements.
    """
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(40, 50, 60, generator=generator)
    return {
        "model.layers.0.weight": values,
        "model.layers.0.bias": values[0, 0].to(torch.bfloat16),
        "turned": values[0].t(),
        "steps": values[::2, 1, ::3],
        "none": torch.zeros(0, 3),
        "number": torch.tensor(7),
        "flags": values[1, 1] > 0,
        "Größe/ü": torch.arange(5, dtype=torch.uint8),
    }


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, shape and type included."""
    same = one.shape == other.shape and one.dtype == other.dtype
    return same and (one.numel() == 0 or bool((bits(one) == bits(other)).all()))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor."""
    return (
        tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
    )


class FormatContract:
    """The contract; `kind` and `suffix` come from the format's class."""

    kind: str
    suffix: str
    lazy = True  # a tensor is read when it is first used
    ordered = True  # a dict keeps its order

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return tmp_path / f"state{self.suffix}"

    def test_round_trip(self, path: Path) -> None:
        save(state(), path, self.kind)
        found = load(path)
        assert list(found) == list(state()) or (not self.ordered and set(found) == set(state()))
        assert all(equal(found[name], value) for name, value in state().items())

    def test_from_a_bucket(self, path: Path) -> None:
        """Lazily by ranges, all at once, and as the source of a conversion."""
        save(state(), path, self.kind)
        place = in_bucket(path)
        for options in ({}, {"mapped": False}, {"map_location": "cpu"}):
            found = load(place, **options)
            assert all(equal(found[name], value) for name, value in state().items())
            assert equal(
                load(place, **options)["model.layers.0.weight"][7:9],
                state()["model.layers.0.weight"][7:9],
            )
        with closing(open_source(open_place(place))) as file:
            for name, value in state().items():
                assert equal(file.read(name), value.reshape(-1))
                low, high = min(1, value.numel()), min(4, value.numel())
                assert equal(file.read(name, low, high), value.reshape(-1)[low:high])

    def test_format_is_known_by_content(self, path: Path, tmp_path: Path) -> None:
        save(state(), path, self.kind)
        bare = tmp_path / "no_suffix"
        path.rename(bare)
        assert equal(load(bare)["number"], state()["number"])

    def test_empty(self, path: Path) -> None:
        save({}, path, self.kind)
        assert load(path) == {}

    def test_tied_once_and_again(self, path: Path) -> None:
        weight = torch.randn(1000, 100)
        save({"a": weight, "b": weight, "c": weight[:], "d": weight[1:]}, path, self.kind)
        found = load(path)
        assert path.stat().st_size < 2.5 * weight.nbytes
        found["a"][0, 0] = 7
        assert found["b"][0, 0] == found["c"][0, 0] == 7

    def test_eager(self, path: Path) -> None:
        save(state(), path, self.kind)
        found = load(path, map_location="cpu")
        path.write_bytes(b"")
        assert {type(value) for value in found.values()} == {torch.Tensor}
        assert equal(found["turned"], state()["turned"])

    def test_deleted_and_replaced_files_keep_their_values(self, path: Path) -> None:
        save(state(), path, self.kind)
        deleted, replaced = load(path), load(path)
        save({"number": torch.tensor(8)}, path, self.kind)
        path.unlink()
        assert all(
            equal(deleted[name], value) and equal(replaced[name], value)
            for name, value in state().items()
        )

    def test_cut_short_while_open(self, path: Path) -> None:
        if not self.lazy:
            pytest.skip("torch.load maps what it gives")
        save(state(), path, self.kind)
        found = load(path)
        found["model.layers.0.weight"].sum()
        os.truncate(path, path.stat().st_size // 2)
        for name in state().keys() - {"none"}:  # it has no bytes in the file
            with pytest.raises(CorruptError, match="changed while it was open"):
                found[name].clone()

    def test_cut_short_before(self, path: Path) -> None:
        save(state(), path, self.kind)
        whole = path.read_bytes()
        for size in (0, 1, 9, 600, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:size])
            with pytest.raises((CorruptError, ValueError)):
                load(path, format=self.kind)

    def test_refusal_leaves_the_old_file(self, path: Path) -> None:
        save({"number": torch.tensor(1)}, path, self.kind)
        with pytest.raises((SelectionError, AttributeError, TypeError, RuntimeError)):
            save({"number": torch.tensor(2), "bad": lambda: 0}, path, self.kind)
        assert load(path)["number"] == 1
        assert list(path.parent.iterdir()) == [path]

    def test_mode_follows_the_umask(self, path: Path) -> None:
        before = os.umask(0o027)
        try:
            save(state(), path, self.kind)
        finally:
            os.umask(before)
        assert stat.S_IMODE(path.stat().st_mode) == 0o640

    def test_no_folder(self, tmp_path: Path) -> None:
        with pytest.raises(TargetError, match="its folder does not exist"):
            save({}, tmp_path / "missing" / f"state{self.suffix}", self.kind)

    def test_a_link_stays_a_link(self, path: Path, tmp_path: Path) -> None:
        real = tmp_path / "real"
        path.symlink_to(real)
        save(state(), path, self.kind)
        assert path.is_symlink()
        assert equal(load(real)["number"], state()["number"])

    def test_killed_while_saving(self, path: Path) -> None:
        """Killed at any moment, the file is the old one or the new one."""
        save({"number": torch.tensor(1), "big": torch.full((300_000,), 1)}, path, self.kind)
        for moment in range(4):
            done = [1]

            def until(said: TextIO, moment: int = moment, done: list[int] = done) -> None:
                done += [int(said.readline() or 1) for _ in range(1 + moment)]
                time.sleep(0.003 * moment)

            killed = run_and_signal(SAVE_FOREVER, path, self.kind, until=until)
            assert killed.returncode == -signal.SIGKILL, killed.stderr
            last = max([*done, *map(int, killed.stdout.split())])
            found = load(path)
            assert int(found["number"]) in (last, last + 1)
            assert bool((found["big"] == found["number"]).all())
        save({}, path, self.kind)
        assert list(path.parent.iterdir()) == [path]

    def test_disk_full(self, path: Path) -> None:
        save({"number": torch.tensor(1)}, path, self.kind)
        ended = run_python(SAVE_TOO_MUCH, path, self.kind)
        assert ended.returncode == 0, ended.stderr
        assert "True" in ended.stdout
        assert load(path)["number"] == 1
        assert list(path.parent.iterdir()) == [path]


def filled(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """Any bits at all, NaN and denormals included; bool only has two."""
    size = torch.Size(shape).numel() * ITEM_BYTES[dtype]
    if size == 0:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    data = torch.frombuffer(bytearray(os.urandom(size)), dtype=torch.uint8)
    return ((data & 1) if dtype == "bool" else data).view(getattr(torch, dtype)).reshape(shape)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor as `bytes`."""
    return bytes(bits(tensor).numpy()) if tensor.numel() else b""
