"""Stored tensors into what a rank holds, many at once: any block, view, dtype and size, and every
way it falls back.
"""

import errno
import math
import os
import tempfile
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import models
import pytest
import torch
from hypothesis import given, settings, strategies as st
from raw_files import raw_file
from safetensors.torch import save_file
from seeds import examples

import ft_ckpt
from ft_ckpt.errors import CorruptError, LoadError
from ft_ckpt.extensions.hdf5 import hdf5
from ft_ckpt.formats.files import raw_file as raw_files, read_onto
from ft_ckpt.formats.safetensors import safetensors_file
from ft_ckpt.model.files import fetching_weights
from ft_ckpt.ranks.moving import WantedTensor, fill, fill_all
from ft_ckpt.ranks.sharding import Box, ReplicatedSharding, Source
from ft_ckpt.storage.io import whole_files
from ft_ckpt.storage.local import LocalStore

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.bool,
    torch.uint8,
    torch.complex64,
    torch.float8_e4m3fn,
]


class Converted:
    """A file whose tensors are not there as plain bytes."""

    def __init__(self, file):
        self.specs, self.read = file.specs, file.read

    def runs(self, name):
        return None


def values(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    raw_bytes = torch.randint(
        0, 2, (math.prod(shape) * dtype.itemsize,), generator=generator, dtype=torch.uint8
    )
    return raw_bytes.view(dtype).view(shape) if shape else raw_bytes.view(dtype)[0].clone()


def same(one, other):
    raw_bytes = [
        tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        for tensor in (one, other)
    ]
    return torch.equal(*raw_bytes)


def source(name, full, view, block, has_gaps=False):
    """A tensor of which this rank has `block`, with nothing of the stored values in it."""
    local = torch.zeros(
        *block.sizes[:-1], 2 * block.sizes[-1] if has_gaps else block.sizes[-1], dtype=full.dtype
    )
    if has_gaps:
        local = local[..., ::2]
    return made(name, full, view, local, block)


@dataclass(frozen=True)
class OneBox(ReplicatedSharding):
    """This rank has one box of the tensor, any one."""

    here: Box | None = None

    def local_boxes(self, rank):
        return (self.here,)


def made(name, full, view, local, block):
    sharding = OneBox(tuple(view), here=block)
    info = Source(0, name, name, tuple(full.shape), full.dtype, True, True, "plain", sharding)
    return WantedTensor(info, local, None, name)


def of(file, *wanted):
    return [replace(one, file=file) for one in wanted]


def whole(name, full):
    local = torch.zeros_like(full)
    return made(name, full, full.shape, local, Box((0,) * full.dim(), tuple(full.shape)))


@st.composite
def blocks_of_tensors(draw):
    """(shape, dtype, view, block of the view, whether its memory has gaps), some of which are
    empty.
    """
    shape = draw(st.lists(st.integers(0, 9), max_size=4).map(tuple))
    view = draw(st.sampled_from([shape, (math.prod(shape),)])) if shape else ()
    offsets = [draw(st.integers(0, max(size - 1, 0))) for size in view]
    sizes = [
        draw(st.integers(min(1, size), size - low)) for size, low in zip(view, offsets, strict=True)
    ]
    gaps = draw(st.booleans()) if view else False
    return shape, draw(st.sampled_from(DTYPES)), view, Box(tuple(offsets), tuple(sizes)), gaps


def stored(tensors, kind, folder):
    """The open file of `kind` with these tensors."""
    if kind == "h5":
        ft_ckpt.save(tensors, folder / "x.h5")
        return hdf5.open_hdf5(raw_file(folder / "x.h5"))
    save_file(tensors, folder / "x.safetensors")
    file = safetensors_file.open_safetensors(raw_file(folder / "x.safetensors"))
    return Converted(file) if kind == "converted" else file


@settings(max_examples=examples(80), deadline=None)
@given(
    asked=st.lists(blocks_of_tensors(), min_size=1, max_size=8),
    kind=st.sampled_from(["safetensors", "h5", "converted"]),
    least=st.sampled_from([1, 8, 64 << 10]),
    stage=st.sampled_from([1, 40, 16 << 20]),
    direct=st.sampled_from(["auto", "on", "off"]),
)
def test_any_blocks_of_any_tensors(asked, kind, least, stage, direct):
    full = {f"t{n}": values(shape, dtype, n) for n, (shape, dtype, *_) in enumerate(asked)}
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(fill, "_MIN_RUN_BYTES", least)
        patch.setattr(fill, "_STAGE_BYTES", stage)
        file = stored(full, kind, Path(folder))
        wanted = []
        for name, (_, _, view, block, gaps) in zip(full, asked, strict=True):
            wanted.append(
                source(name, full[name], view, block, gaps) if view else whole(name, full[name])
            )
        fill_all(reversed(of(file, *wanted)), threads=2, direct=direct)
    for one in wanted:
        expected = full[one.name].view(one.info.sharding.view)
        (box,) = one.boxes
        for dim, (low, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            expected = expected.narrow(dim, low, size)
        assert same(one.local, expected), one.name


def test_what_is_not_this_ranks_stays(tmp_path):
    """A run in the middle of a flat buffer: its neighbours are not touched."""
    full = values((33,), torch.float32)
    file = stored({"a": full}, "safetensors", tmp_path)
    buffer = torch.full((10,), 7.0)
    fill_all(of(file, made("a", full, (33,), buffer[3:8], Box((20,), (5,)))))
    assert buffer.tolist() == [7.0] * 3 + full[20:25].tolist() + [7.0] * 2


@pytest.mark.slow
def test_twenty_thousand_tiny_tensors_and_a_large_one(tmp_path, monkeypatch):
    full = {f"t{n}": torch.full((n % 5,), n) for n in range(20_000)}
    full["large"] = values(((21 << 20) + 13,), torch.uint8)
    file = stored(full, "safetensors", tmp_path)
    calls, real = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda *place: calls.append(place[2]) or real(*place))
    wanted = of(file, *(whole(name, tensor) for name, tensor in full.items()))
    assert fill_all(wanted) == sum(tensor.nbytes for tensor in full.values())
    assert all(torch.equal(one.local, full[one.name]) for one in wanted)
    assert len(calls) < 20


def test_the_version_of_what_was_filled_changes(tmp_path):
    """A later save must not take it for the tensor of the checkpoint before."""
    full = values((5,), torch.float32)
    parameter = torch.nn.Parameter(torch.zeros(5))
    one = made("a", full, (5,), parameter.detach(), Box((0,), (5,)))
    before = parameter._version
    fill_all(of(stored({"a": full}, "safetensors", tmp_path), one))
    assert parameter._version > before


def test_all_problems_at_once_and_nothing_read(tmp_path):
    full = values((4, 3), torch.float32)
    file = stored({name: full.clone() for name in "abc"}, "safetensors", tmp_path)
    good = whole("a", full)
    problems = [whole("b", full.view(3, 4)), whole("c", full.double())]
    with pytest.raises(LoadError) as caught:
        fill_all(of(file, good, *problems, whole("d", full)))
    for text in (
        "b: float32 [4, 3] in the checkpoint",
        "c: float32 [4, 3]",
        "d: not in the checkpoint",
    ):
        assert text in str(caught.value)
    assert not good.local.any()


def test_without_unbuffered_reads(tmp_path, monkeypatch):
    real = os.open

    def refuse(name, flags, *mode):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real(name, flags, *mode)

    full = values(((9 << 20) + 5,), torch.uint8)
    file = stored({"a": full}, "safetensors", tmp_path)
    monkeypatch.setattr(os, "open", refuse)
    one = whole("a", full)
    fill_all(of(file, one), direct="on")
    assert torch.equal(one.local, full)
    assert file.raw.read_in(direct="on")
    assert torch.equal(file.read("a"), full)


def test_a_file_that_changes_is_an_error(tmp_path):
    full = {"a": values((9 << 20,), torch.uint8)}
    file = stored(full, "safetensors", tmp_path)
    os.truncate(tmp_path / "x.safetensors", 1 << 20)
    with pytest.raises(CorruptError, match=r"x\.safetensors"):
        fill_all(of(file, whole("a", full["a"])))
    with pytest.raises(CorruptError, match="changed while it was open"):
        file.raw.read_in()


@pytest.mark.parametrize("kind", ["safetensors", "h5", "converted"])
def test_onto_a_device(tmp_path, kind):
    full = {
        "a": values((70, 41), torch.bfloat16),
        "b": values((), torch.float32),
        "c": torch.empty(0, 3),
    }
    found = read_onto(stored(full, kind, tmp_path), torch.device("cpu"))
    assert found.keys() == full.keys()
    assert all(
        found[name].shape == full[name].shape and same(found[name], full[name]) for name in full
    )


@pytest.mark.parametrize("direct", ["auto", "on", "off"])
def test_a_file_read_in_gives_what_a_mapped_one_gives(tmp_path, direct, monkeypatch):
    monkeypatch.setattr(raw_files, "MAP_BYTES", 100)
    full = {
        f"t{n}": values((size,), torch.uint8, n)
        for n, size in enumerate([1, 99, 100, 5000, (9 << 20) + 1])
    }
    file = stored(full, "safetensors", tmp_path)
    assert file.raw.read_in(threads=3, direct=direct)
    for turn in range(2):  # what was let go and asked for again is read again
        for name, tensor in full.items():
            found = file.read(name)
            assert torch.equal(found, tensor), (turn, name)
            found.zero_()  # never reaches the file
    assert not file.raw.read_in(), "it lies in memory already"


def test_a_closed_file_leaves_its_tensors(tmp_path):
    full = {"a": values((3 << 20,), torch.uint8)}
    file = stored(full, "safetensors", tmp_path)
    file.raw.read_in()
    found = file.read("a")
    file.close()
    os.truncate(tmp_path / "x.safetensors", 0)
    del file
    assert torch.equal(found, full["a"]), "a mapped one would be gone"


@pytest.mark.parametrize(
    ("mapped", "in_cache", "expected"),
    [
        (True, 0, True),
        (False, 1, False),
        ("auto", 0, False),
        ("auto", 1, True),
        ("auto", None, True),
    ],
)
def test_load_model_reads_what_is_cold_and_maps_the_rest(
    tmp_path, monkeypatch, mapped, in_cache, expected
):
    net = models.build("llama")
    ft_ckpt.CheckpointSaver().save(net, tmp_path / "net")
    monkeypatch.setattr(whole_files, "MIN_BYTES", 1)
    monkeypatch.setattr(
        whole_files,
        "cached_bytes",
        lambda _, start, size: None if in_cache is None else in_cache * size,
    )
    model, report = ft_ckpt.load_model(tmp_path / "net", mapped=mapped, with_report=True)
    assert report.zero_copy is expected
    assert all(
        torch.equal(tensor, net.state_dict()[name]) for name, tensor in model.state_dict().items()
    )
    model.lm_head.weight.data.zero_()
    assert torch.equal(ft_ckpt.load_model(tmp_path / "net").lm_head.weight, net.lm_head.weight)


def test_ranks_of_one_machine_share_the_page_cache(tmp_path, monkeypatch):
    ft_ckpt.CheckpointSaver().save(models.build("llama"), tmp_path / "net")
    monkeypatch.setattr(whole_files, "MIN_BYTES", 1)
    monkeypatch.setattr(whole_files, "cached_bytes", lambda *_: 0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert ft_ckpt.load_model(tmp_path / "net", with_report=True)[1].zero_copy


def test_no_memory_for_a_cold_file_maps_it(tmp_path, monkeypatch):
    ft_ckpt.CheckpointSaver().save(models.build("llama"), tmp_path / "net")
    monkeypatch.setattr(whole_files, "MIN_BYTES", 1)
    monkeypatch.setattr(whole_files, "cached_bytes", lambda *_: 0)
    monkeypatch.setattr(whole_files, "available_bytes", lambda: 1 << 10)
    assert ft_ckpt.load_model(tmp_path / "net", with_report=True)[1].zero_copy


def test_files_are_read_beside_the_block_and_not_after_it(tmp_path, monkeypatch):
    file, full = tmp_path / "x.safetensors", {"a": values((40 << 20,), torch.uint8)}
    save_file(full, file)
    before = set(Path("/proc/self/fd").iterdir())
    with fetching_weights(LocalStore(tmp_path), ["x.safetensors"], mapped=False) as tensors:
        assert same(tensors()[0]["a"], full["a"])
    monkeypatch.setattr(raw_files.RawFile, "is_cold", lambda file: is_over.wait(60))
    is_over = threading.Event()
    monkeypatch.setattr(
        raw_files.RawFile,
        "close",
        lambda file, close=raw_files.RawFile.close: (close(file), is_over.set()),
    )
    with (
        pytest.raises(ZeroDivisionError),
        fetching_weights(LocalStore(tmp_path), ["x.safetensors"]) as tensors,
    ):
        1 / 0  # noqa: B018
    with pytest.raises(CorruptError, match="closed"):
        tensors()
    assert set(Path("/proc/self/fd").iterdir()) == before
    assert not [
        thread for thread in threading.enumerate() if thread.name.startswith("ft_ckpt-supply")
    ]


def test_mapped_is_one_of_three(tmp_path):
    with pytest.raises(LoadError, match="mapped='yes'"):
        ft_ckpt.load_model(tmp_path, mapped="yes")
