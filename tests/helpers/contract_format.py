"""Contract tests of the formats of `save` and `load`: a class that inherits them names a format."""

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
    """Make a flat state dict that every format keeps.

    It has usual dtypes, tensors without elements or dimensions, and gaps between elements.
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


def equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Compare bit for bit, shape and dtype included."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return first.numel() == 0 or torch.equal(bits(first), bits(second))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Copy the bytes of a tensor in row-major order: 1-D, uint8."""
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    return copy.reshape(-1).view(torch.uint8)


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
        loaded = load(path)
        if self.ordered:
            assert list(loaded) == list(state())
        assert set(loaded) == set(state())
        assert all(equal(loaded[name], value) for name, value in state().items())

    def test_from_a_bucket(self, path: Path) -> None:
        """Lazily by ranges, all at once, and as the source of a conversion."""
        save(state(), path, self.kind)
        place = in_bucket(path)
        for options in ({}, {"mapped": False}, {"map_location": "cpu"}):
            loaded = load(place, **options)
            assert all(equal(loaded[name], value) for name, value in state().items())
            rows = load(place, **options)["model.layers.0.weight"][7:9]
            assert equal(rows, state()["model.layers.0.weight"][7:9])
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
        loaded = load(path)
        assert path.stat().st_size < 2.5 * weight.nbytes
        loaded["a"][0, 0] = 7
        assert loaded["b"][0, 0] == loaded["c"][0, 0] == 7

    def test_eager(self, path: Path) -> None:
        save(state(), path, self.kind)
        loaded = load(path, map_location="cpu")
        path.write_bytes(b"")
        assert {type(value) for value in loaded.values()} == {torch.Tensor}
        assert equal(loaded["turned"], state()["turned"])

    def test_deleted_and_replaced_files_keep_their_values(self, path: Path) -> None:
        save(state(), path, self.kind)
        deleted, replaced = load(path), load(path)
        save({"number": torch.tensor(8)}, path, self.kind)
        path.unlink()
        for name, value in state().items():
            assert equal(deleted[name], value)
            assert equal(replaced[name], value)

    def test_cut_short_while_open(self, path: Path) -> None:
        if not self.lazy:
            pytest.skip("torch.load maps what it gives")
        save(state(), path, self.kind)
        loaded = load(path)
        loaded["model.layers.0.weight"].sum()
        os.truncate(path, path.stat().st_size // 2)
        for name in state().keys() - {"none"}:  # it has no bytes in the file
            with pytest.raises(CorruptError, match="changed while it was open"):
                loaded[name].clone()

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
            saved = [1]

            def until(output: TextIO, moment: int = moment, saved: list[int] = saved) -> None:
                for _ in range(1 + moment):
                    saved.append(int(output.readline() or 1))
                time.sleep(0.003 * moment)

            killed = run_and_signal(SAVE_FOREVER, path, self.kind, until=until)
            assert killed.returncode == -signal.SIGKILL, killed.stderr
            last = max([*saved, *map(int, killed.stdout.split())])
            loaded = load(path)
            assert int(loaded["number"]) in (last, last + 1)
            assert bool((loaded["big"] == loaded["number"]).all())
        save({}, path, self.kind)
        assert list(path.parent.iterdir()) == [path]

    def test_disk_full(self, path: Path) -> None:
        save({"number": torch.tensor(1)}, path, self.kind)
        result = run_python(SAVE_TOO_MUCH, path, self.kind)
        assert result.returncode == 0, result.stderr
        assert "True" in result.stdout
        assert load(path)["number"] == 1
        assert list(path.parent.iterdir()) == [path]


def filled(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """Make a tensor of random bits, NaN and denormals included; a bool has the two values only."""
    torch_dtype = getattr(torch, dtype)
    size_bytes = torch.Size(shape).numel() * ITEM_BYTES[dtype]
    if size_bytes == 0:
        return torch.empty(shape, dtype=torch_dtype)
    data = torch.frombuffer(bytearray(os.urandom(size_bytes)), dtype=torch.uint8)
    if dtype == "bool":
        data = data & 1
    return data.view(torch_dtype).reshape(shape)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor in row-major order."""
    return bytes(bits(tensor).numpy()) if tensor.numel() else b""
