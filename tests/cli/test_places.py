"""Places on other machines, and other spellings of settings: refused or understood wherever they
can be given.
"""

import pytest
import torch

import ft_ckpt
from ft_ckpt import CheckpointSaver, Every, Keep, SaverConfig, checkpoint_closure, closure
from ft_ckpt.checkpoint.catalog import discover
from ft_ckpt.checkpoint.leases import pin, unpin
from ft_ckpt.errors import ConfigError
from ft_ckpt.storage.places import open_place
from ft_ckpt.values import parse_size

URL = "ftp://bucket/run"
TAKERS = {
    "directory": lambda url: CheckpointSaver(directory=url),
    "save": lambda url: CheckpointSaver().save(torch.nn.Linear(1, 1), url),
    "save_state": lambda url: CheckpointSaver().save_state(torch.nn.Linear(1, 1), url),
    "resume": lambda url: CheckpointSaver().resume(url),
    "one file, written": lambda url: ft_ckpt.save({}, f"{url}/x.h5"),
    "one file, read": lambda url: ft_ckpt.load(f"{url}/x.h5"),
    "load_model": ft_ckpt.load_model,
    "latest": ft_ckpt.latest,
    "verify": ft_ckpt.verify,
    "convert from": lambda url: ft_ckpt.convert(url, "out"),
    "convert to": lambda url: ft_ckpt.convert("in", url),
    "list": lambda url: discover(open_place(url)),
    "pin": lambda url: pin(open_place(url)),
    "unpin": lambda url: unpin(open_place(url)),
}


@pytest.mark.parametrize("scheme", ["hf", "file", "ftp", "http"])
def test_urls_are_refused_by_name(scheme, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"^{scheme}://x/y: {scheme}://: not a local path"):
        CheckpointSaver(directory=f"{scheme}://x/y")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("take", TAKERS.values(), ids=TAKERS)
def test_urls_are_refused_wherever_a_place_is_asked_for(take, tmp_path, monkeypatch):
    """Each made a local folder "ftp:" before, or looked for one."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"ftp:/+bucket/run"):
        take(URL)
    assert not any(tmp_path.iterdir())


def test_a_colon_is_no_url(tmp_path):
    assert (
        CheckpointSaver(directory=tmp_path / "12:30" / "a:b").directory
        == tmp_path / "12:30" / "a:b"
    )


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (torch.bfloat16, "bfloat16"),
        ("bf16", "bfloat16"),
        ("fp16", "float16"),
        ("torch.float32", "float32"),
    ],
)
def test_types_by_any_name(given, meant, tmp_path):
    assert SaverConfig(dtype=given).dtype == meant
    report = CheckpointSaver().save(
        torch.nn.Linear(2, 2, dtype=torch.float64), tmp_path / "out", dtype=given
    )
    assert report.casts == {f"float64->{meant}": 2}
    converted = ft_ckpt.convert(tmp_path / "out", tmp_path / "again", dtype=given, progress=False)
    assert (converted.tensors, converted.casts) == (2, {})


@pytest.mark.parametrize(
    ("size", "size_bytes"),
    [("5GiB", 5 << 30), ("1.5 MiB", 3 << 19), ("2G", 2 * 10**9), ("3ki", 3072)],
)
def test_sizes_in_binary_units(size, size_bytes):
    assert parse_size(size) == size_bytes
    assert SaverConfig(max_shard_size=size).max_shard_bytes == size_bytes


@pytest.mark.parametrize("size", ["5iB", "GiB", "5GBi", "", True, None])
def test_what_is_no_size(size):
    with pytest.raises(ConfigError, match="is not a size"):
        parse_size(size)


def test_numbers_for_schedule_and_retention(tmp_path):
    config = CheckpointSaver(None, tmp_path, every=500, keep=3).config
    assert (config.every, config.keep) == (Every(steps=500), Keep(last=3))
    with pytest.raises(ConfigError, match=r"every=True: expected Every\(...\), a number or None"):
        SaverConfig(every=True)
    with pytest.raises(ConfigError, match="last=0"):
        SaverConfig(keep=0)


def test_a_closure_by_a_number(monkeypatch):
    monkeypatch.setattr(closure, "open_savers", list)  # another test may have left one
    calls = []
    counted = checkpoint_closure(every=2)(lambda: calls.append(1))
    for _ in range(4):
        counted()
    assert len(calls) == 2
