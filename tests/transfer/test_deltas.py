"""Chains of deltas: what is rebuilt is the checkpoint byte for byte, or an error names the
entry.
"""

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from peak_memory import peak_memory
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from seeds import examples

import ft_ckpt
from ft_ckpt import Keep
from ft_ckpt.checkpoint.catalog import discover
from ft_ckpt.checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    PartRecord,
    load_manifest,
    manifest_to_json,
)
from ft_ckpt.errors import ConfigError, CorruptError, LoadError, ManifestError, NameTakenError
from ft_ckpt.extensions.rl.deltas import files as delta_files
from ft_ckpt.runs.folder import prune_run
from ft_ckpt.storage.digests import read_record
from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage.places import open_place

Tensors = dict[str, torch.Tensor]
KINDS = (
    "bfloat16",
    "float16",
    "float32",
    "float64",
    "int8",
    "uint8",
    "int32",
    "int64",
    "bool",
    "complex64",
)


def commit(folder: Path, step: int, files: dict[str, Tensors], state: bytes = b"") -> Path:
    """A checkpoint of these safetensors files, with a config and a training state."""
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    for name, tensors in files.items():
        save_file(tensors, path / name, metadata={"format": "pt"})
    (path / "config.json").write_text('{"model_type": "llama"}')
    if state:
        (path / "state").mkdir()
        (path / "state/rank_0").write_bytes(state)
    store = LocalStore(path)
    parts = (PartRecord("state", "state", "state", "safetensors", "", ()),) if state else ()
    records = tuple(read_record(store, each.name) for each in store.list())
    created = f"2026-01-01T00:00:00.{step:06}+00:00"
    manifest = Manifest(parts, records, "full", created, step=step, run_id="a")
    (path / MANIFEST_NAME).write_text(manifest_to_json(manifest))
    return path


def sample(seed: int = 0, numel: int = 4000) -> dict[str, Tensors]:
    torch.manual_seed(seed)
    one = {
        "a.weight": torch.randn(numel).bfloat16(),
        "b": torch.randn(40, 50),
        "steps": torch.tensor(seed),
    }
    return {
        "model-1.safetensors": one,
        "model-2.safetensors": {"c": torch.randn(9).half(), "none": torch.zeros(0)},
    }


def changed(files: dict[str, Tensors], seed: int, share: float = 0.01) -> dict[str, Tensors]:
    torch.manual_seed(seed)
    return {
        name: {
            key: torch.where(torch.rand(each.shape) < share, each + 1, each)
            for key, each in tensors.items()
        }
        for name, tensors in files.items()
    }


def files_of(path: Path, *without: str) -> dict[str, bytes]:
    found = {
        each.relative_to(path).as_posix(): each.read_bytes()
        for each in path.rglob("*")
        if each.is_file()
    }
    return {
        name: content
        for name, content in found.items()
        if not name.startswith((".ft_ckpt", *without))
    }


def grow(folder: Path, chain: Path | str, count: int, anchor_every: int = 10) -> list[Path]:
    """A run of `count` checkpoints, each appended to the chain."""
    files, paths = sample(), list[Path]()
    for step in range(1, count + 1):
        paths.append(commit(folder, step, files, b"state" * 100))
        ft_ckpt.publish(paths[-1], str(chain), delta=True, anchor_every=anchor_every)
        files = changed(files, step)
    return paths


def kinds(chain: Path | str) -> list[str]:
    return [info.manifest.kind for info in discover(open_place(chain))]


def assert_rebuilt(entry: Path | str, folder: Path, original: Path) -> None:
    ft_ckpt.pull(open_place(entry), folder)
    assert files_of(folder, MANIFEST_NAME) == files_of(original, MANIFEST_NAME, "state")
    assert ft_ckpt.verify(folder).ok


# Exactness


@st.composite
def pairs(draw: st.DrawFn) -> tuple[dict[str, Tensors], dict[str, Tensors]]:
    """Files of tensors of any bits, and the same with some bytes changed."""
    before, after = dict[str, Tensors](), dict[str, Tensors]()
    for number in range(draw(st.integers(1, 3))):
        old, new = Tensors(), Tensors()
        for index in range(draw(st.integers(1, 4))):
            dtype = getattr(torch, draw(st.sampled_from(KINDS)))
            shape = draw(st.sampled_from([(), (0,), (1,), (7,), (3, 5), (2, 0, 4)]))
            size = math.prod(shape) * dtype.itemsize
            most = 1 if dtype == torch.bool else 255
            bits = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8) & most
            places = draw(st.lists(st.integers(0, size - 1), max_size=3)) if size else []
            other = bits.copy()
            other[places] = draw(st.integers(0, most))
            for tensors, content in ((old, bits), (new, other)):
                flat = (
                    torch.frombuffer(bytearray(content.tobytes()), dtype=dtype)
                    if size
                    else torch.zeros(0, dtype=dtype)
                )
                tensors[f"t{index}"] = flat.reshape(shape)
        before[f"model-{number}.safetensors"], after[f"model-{number}.safetensors"] = old, new
    return before, after


@settings(max_examples=examples(60), deadline=None)
@given(pairs())
def test_any_bits_come_back(
    tmp_path_factory: pytest.TempPathFactory, made: tuple[Any, Any]
) -> None:
    root = tmp_path_factory.mktemp("bits")
    padding = {"big": torch.zeros(100_000, dtype=torch.uint8)}  # so that a delta is the smaller
    first, second = (
        commit(root / "run", step, {**files, "z.safetensors": padding})
        for step, files in enumerate(made)
    )
    chain = root / "chain"
    for path in (first, second):
        ft_ckpt.publish(path, str(chain), delta=True)
    assert kinds(chain) == ["full", "delta"]
    assert_rebuilt(chain / "checkpoint-1", root / "out", second)
    shutil.rmtree(root)


def test_bits_that_compare_equal_or_never_equal(tmp_path: Path) -> None:
    numbers = [0x0000, 0x8000, 0x7FC0, 0x7FC1, 0xFFC0, 0x7F80] * 1000  # 0, -0, three NaN, infinity
    old = torch.tensor(numbers, dtype=torch.uint16).view(torch.bfloat16)
    new = old.view(torch.int16).clone()
    new[0], new[2] = -0x8000, 0x7FC1
    commit(tmp_path / "run", 1, {"model.safetensors": {"w": old}})
    second = commit(tmp_path / "run", 2, {"model.safetensors": {"w": new.view(torch.bfloat16)}})
    for step in (1, 2):
        ft_ckpt.publish(tmp_path / f"run/checkpoint-{step}", str(tmp_path / "chain"), delta=True)
    found = load_file(tmp_path / "chain/checkpoint-2/deltas/model.safetensors/00001.safetensors")
    assert found["w.indices"].tolist() == [0, 2]  # and no NaN that stayed
    assert (found["w.indices"].dtype, found["w.values"].dtype) == (torch.int32, torch.bfloat16)
    assert_rebuilt(tmp_path / "chain/checkpoint-2", tmp_path / "out", second)


@pytest.mark.parametrize("piece_bytes", [1, 4096])
def test_tensors_that_go_on_in_the_next_file(
    tmp_path: Path, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_files, "_PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(delta_files, "_SLICE_BYTES", 1 << 10)
    paths = grow(tmp_path / "run", tmp_path / "chain", 4)
    assert len(list((tmp_path / "chain/checkpoint-2/deltas").rglob("*.safetensors"))) > (
        1 if piece_bytes > 1 else 4
    )
    assert_rebuilt(tmp_path / "chain/checkpoint-4", tmp_path / "out", paths[3])


def test_positions_from_two_to_the_31_on_are_int64(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(delta_files, "_INT32_ELEMENTS", 1000)
    paths = grow(tmp_path / "run", tmp_path / "chain", 2)
    found = load_file(tmp_path / "chain/checkpoint-2/deltas/model-1.safetensors/00001.safetensors")
    assert found["a.weight.indices"].dtype == torch.int64
    assert_rebuilt(tmp_path / "chain/checkpoint-2", tmp_path / "out", paths[1])


def test_other_headers_and_sidecar_files(tmp_path: Path) -> None:
    """Metadata of another length move the tensors; files come, go and change."""
    commit(tmp_path / "run", 1, sample())
    path = tmp_path / "run/checkpoint-2"
    path.mkdir()
    for name, tensors in changed(sample(), 1).items():
        save_file(
            tensors, path / name, metadata={"format": "pt", "of": "the second, which is longer"}
        )
    (path / "tokenizer.json").write_text("{}")
    store = LocalStore(path)
    records = tuple(read_record(store, each.name) for each in store.list())
    (path / MANIFEST_NAME).write_text(
        manifest_to_json(
            Manifest((), records, "full", "2026-01-02T00:00:00+00:00", step=2, run_id="a")
        )
    )
    for step in (1, 2):
        ft_ckpt.publish(tmp_path / f"run/checkpoint-{step}", str(tmp_path / "chain"), delta=True)
    assert kinds(tmp_path / "chain") == ["full", "delta"]
    assert_rebuilt(tmp_path / "chain/checkpoint-2", tmp_path / "out", path)


# Chains


@pytest.mark.slow
@pytest.mark.parametrize("place", ["folder", "bucket"])
def test_a_chain_of_twelve(tmp_path: Path, place: str, request: pytest.FixtureRequest) -> None:
    chain = str(tmp_path / "chain")
    if place == "bucket":
        request.getfixturevalue("s3")
        chain = "s3://bucket/chain"
    paths = grow(tmp_path / "run", chain, 12, anchor_every=5)
    assert kinds(chain) == [*["full", *["delta"] * 4] * 2, "full", "delta"]
    assert all(ft_ckpt.verify(info.place).ok for info in discover(open_place(chain)))
    for step in (1, 5, 6, 12):
        assert_rebuilt(f"{chain}/checkpoint-{step}", tmp_path / f"alone-{step}", paths[step - 1])
    ids = set()
    for step in range(1, 13):  # each from the one before
        assert_rebuilt(
            f"{chain}/checkpoint-{step}", tmp_path / f"stage/checkpoint-{step}", paths[step - 1]
        )
        ids.add((tmp_path / f"stage/checkpoint-{step}" / MANIFEST_NAME).read_bytes())
    assert (tmp_path / "alone-12" / MANIFEST_NAME).read_bytes() in ids


def test_the_same_again_is_nothing_new(tmp_path: Path) -> None:
    paths = grow(tmp_path / "run", tmp_path / "chain", 3)
    before = files_of(tmp_path / "chain")
    for path in paths:
        report = ft_ckpt.publish(path, str(tmp_path / "chain"), delta=True)
        assert not report.servers[0].is_new
    assert files_of(tmp_path / "chain") == before


def test_the_base_comes_from_the_run_or_else_from_the_chain(tmp_path: Path) -> None:
    chain = tmp_path / "chain"
    paths = grow(tmp_path / "run", chain, 3)
    for path in paths[:3]:
        shutil.rmtree(path)
    new = commit(tmp_path / "run", 4, changed(changed(changed(sample(), 1), 2), 9))
    assert ft_ckpt.publish(new, str(chain), delta=True).kind == "delta"
    assert_rebuilt(chain / "checkpoint-4", tmp_path / "out", new)


def test_what_is_no_delta_is_an_anchor(tmp_path: Path) -> None:
    chain = str(tmp_path / "chain")

    def kind(step, files):
        checkpoint = commit(tmp_path / "run", step, files)
        return ft_ckpt.publish(checkpoint, chain, delta=True).kind

    assert kind(1, sample()) == "anchor"
    assert kind(2, changed(sample(), 1, share=0.9)) == "anchor"  # too much of it
    renamed = {
        name: {f"x.{key}": each for key, each in tensors.items()}
        for name, tensors in sample().items()
    }
    assert kind(3, renamed) == "anchor"
    assert (
        kind(4, {name: {key: each[None] for key, each in x.items()} for name, x in renamed.items()})
        == "anchor"
    )
    assert kind(5, sample()) == "anchor"
    assert kind(6, changed(sample(), 1)) == "delta"


def test_a_damaged_base_gives_an_anchor(tmp_path: Path) -> None:
    chain = tmp_path / "chain"
    first = grow(tmp_path / "run", chain, 1)[0]
    for damaged in (first, chain / "checkpoint-1"):
        flip(damaged / "model-1.safetensors")
    with pytest.warns(
        UserWarning, match="writing an anchor, because there is no delta on checkpoint-1"
    ):
        report = ft_ckpt.publish(
            commit(tmp_path / "run", 2, changed(sample(), 1)), str(chain), delta=True
        )
    assert report.kind == "anchor"


def test_a_damaged_checkpoint_is_not_appended(tmp_path: Path) -> None:
    grow(tmp_path / "run", tmp_path / "chain", 1)
    path = commit(tmp_path / "run", 2, changed(sample(), 1))
    flip(path / "model-1.safetensors")
    with pytest.warns(UserWarning, match="an anchor"), pytest.raises(CorruptError, match="model-1"):
        ft_ckpt.publish(path, str(tmp_path / "chain"), delta=True)
    assert kinds(tmp_path / "chain") == ["full"]


def test_older_and_other_checkpoints_are_refused(tmp_path: Path) -> None:
    chain = tmp_path / "chain"
    paths = grow(tmp_path / "run", chain, 3)
    shutil.rmtree(chain / "checkpoint-2")
    with pytest.raises(NameTakenError, match="older than checkpoint-3"):
        ft_ckpt.publish(paths[1], str(chain), delta=True)
    other = commit(tmp_path / "other", 3, sample(5))
    with pytest.raises(NameTakenError, match="another checkpoint of this name"):
        ft_ckpt.publish(other, str(chain), delta=True)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def lose(name: str) -> Callable[[Path], None]:
    return lambda chain: shutil.rmtree(chain / name)


def swap(chain: Path) -> None:
    (chain / "checkpoint-2").rename(chain / "x")
    (chain / "checkpoint-3").rename(chain / "checkpoint-2")
    (chain / "x").rename(chain / "checkpoint-3")


def replace_base(chain: Path) -> None:
    shutil.rmtree(chain / "checkpoint-1")
    commit(chain, 1, sample(7))


def loop(chain: Path) -> None:
    place = LocalStore(chain / "checkpoint-2")
    manifest = load_manifest(place)
    text = manifest_to_json(replace(manifest, delta={**manifest.delta, "base": "checkpoint-4"}))
    (chain / "checkpoint-2" / MANIFEST_NAME).write_text(text)


PIECE = "deltas/model-1.safetensors/00001.safetensors"
BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing anchor": (lose("checkpoint-1"), "based on checkpoint-1, which is not in the chain"),
    "missing delta": (lose("checkpoint-3"), "based on checkpoint-3, which is not in the chain"),
    "damaged anchor": (
        lambda chain: flip(chain / "checkpoint-1/model-1.safetensors"),
        "checkpoint-1: model-1",
    ),
    "damaged delta": (lambda chain: flip(chain / "checkpoint-2" / PIECE), "checkpoint-2: deltas/"),
    "damaged manifest": (
        lambda chain: flip(chain / "checkpoint-2/checkpoint.json"),
        "checkpoint-2",
    ),
    "reordered": (swap, "checkpoint-[23]: not the checkpoint that"),
    "foreign base": (replace_base, "checkpoint-1: not the checkpoint that"),
    "a loop": (loop, "checkpoint-[24]"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_chain_is_refused_by_name(tmp_path: Path, name: str) -> None:
    chain = tmp_path / "chain"
    grow(tmp_path / "run", chain, 4)
    do, expected = BROKEN[name]
    do(chain)
    with pytest.raises(ft_ckpt.errors.CheckpointError, match=expected) as caught:
        ft_ckpt.pull(chain / "checkpoint-4", tmp_path / "out")
    assert "--anchor-every 1" in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("base", ["../run/checkpoint-1", "/", "", "..", "a/b"])
def test_a_base_elsewhere_is_refused(tmp_path: Path, base: str) -> None:
    grow(tmp_path / "run", tmp_path / "chain", 2)
    path = tmp_path / "chain/checkpoint-2"
    manifest = load_manifest(LocalStore(path))
    (path / MANIFEST_NAME).write_text(
        manifest_to_json(replace(manifest, delta={**manifest.delta, "base": base}))
    )
    with pytest.raises(ManifestError, match="expected the name of its base"):
        ft_ckpt.pull(path, tmp_path / "out")
    assert prune_run(open_place(tmp_path / "chain"), Keep(last=1)).dropped == ()


def hostile(change: Callable[[Tensors], Any]) -> Callable[[Path], None]:
    """Changes a file of a delta, and its manifest with it."""

    def do(path: Path) -> None:
        file = path / PIECE
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata()
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata)
        manifest, store = load_manifest(LocalStore(path)), LocalStore(path)
        records = tuple(read_record(store, each.path) for each in manifest.files)
        (path / MANIFEST_NAME).write_text(manifest_to_json(replace(manifest, files=records)))

    return do


NAME = "a.weight.indices"
HOSTILE: dict[str, Callable[[Tensors], Any]] = {
    "outside": lambda found: found[NAME].add_(1 << 30),
    "negative": lambda found: found[NAME].sub_(1 << 30),
    "repeated": lambda found: found[NAME].zero_(),
    "no integers": lambda found: found.update({NAME: found[NAME].float()}),
    "two dimensions": lambda found: found.update({NAME: found[NAME][None]}),
    "short": lambda found: found.update({NAME: found[NAME][1:].clone()}),
    "no values": lambda found: found.pop("a.weight.values"),
    "other values": lambda found: found["a.weight.values"].zero_(),
    "no tensor": lambda found: found.update(
        {"x.indices": found[NAME].clone(), "x.values": found["a.weight.values"].clone()}
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_delta_is_refused(tmp_path: Path, name: str) -> None:
    grow(tmp_path / "run", tmp_path / "chain", 2)
    hostile(HOSTILE[name])(tmp_path / "chain/checkpoint-2")
    with pytest.raises(CorruptError, match=r"model-1\.safetensors"):
        ft_ckpt.pull(tmp_path / "chain/checkpoint-2", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_damaged_copy_in_the_stage_is_not_used(tmp_path: Path) -> None:
    chain = tmp_path / "chain"
    paths = grow(tmp_path / "run", chain, 3)
    assert_rebuilt(chain / "checkpoint-2", tmp_path / "stage/checkpoint-2", paths[1])
    flip(tmp_path / "stage/checkpoint-2/model-1.safetensors")
    assert_rebuilt(chain / "checkpoint-3", tmp_path / "stage/checkpoint-3", paths[2])


def test_pruning_keeps_the_bases_of_what_is_kept(tmp_path: Path) -> None:
    chain = tmp_path / "chain"
    paths = grow(tmp_path / "run", chain, 8, anchor_every=4)
    report = prune_run(open_place(chain), Keep(last=2))
    assert sorted(path.name for path in chain.iterdir()) == [
        f"checkpoint-{step}" for step in (5, 6, 7, 8)
    ]
    assert report.kept[chain / "checkpoint-5"] == ("the base of checkpoint-6",)
    assert_rebuilt(chain / "checkpoint-8", tmp_path / "out", paths[7])


def test_a_chain_is_copied_by_sync(tmp_path: Path) -> None:
    paths = grow(tmp_path / "run", tmp_path / "chain", 3)
    assert ft_ckpt.sync(tmp_path / "chain", tmp_path / "there").problems == ()
    assert_rebuilt(tmp_path / "there/checkpoint-3", tmp_path / "out", paths[2])


def test_a_delta_is_not_taken_for_weights(tmp_path: Path) -> None:
    grow(tmp_path / "run", tmp_path / "chain", 2)
    entry = tmp_path / "chain/checkpoint-2"
    readers: list[Callable[[], Any]] = [
        lambda: ft_ckpt.load_model(entry),
        lambda: ft_ckpt.convert(entry, tmp_path / "out.h5"),
        lambda: ft_ckpt.average([entry, entry], tmp_path / "out"),
    ]
    for read in readers:
        with pytest.raises(
            LoadError, match=r"checkpoint-2: a delta on checkpoint-1, .* `ft-ckpt pull`"
        ):
            read()


def test_the_cache_gets_the_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FT_CKPT_CACHE", str(tmp_path / "cache"))
    paths = grow(tmp_path / "run", tmp_path / "chain", 2)
    report = ft_ckpt.pull(tmp_path / "chain/checkpoint-2")
    assert files_of(report.path, MANIFEST_NAME) == files_of(paths[1], MANIFEST_NAME, "state")


@pytest.mark.parametrize(
    ("url", "options", "expected"),
    [
        ("http://127.0.0.1:1", {"delta": True}, "expected a folder or a bucket"),
        ("/a/chain", {}, "expected the address of a server"),
        (
            "/a/chain",
            {"delta": True, "name": "policy", "check": "listed"},
            "check, name: of servers",
        ),
        ("http://127.0.0.1:1", {"anchor_every": 5}, "anchor_every: of chains"),
        ("/a/chain", {"delta": True, "anchor_every": 0}, "anchor_every=0"),
    ],
)
def test_servers_and_chains_are_not_confused(
    url: str, options: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        ft_ckpt.publish("/nowhere", url, **options)


@pytest.mark.slow
@pytest.mark.parametrize("weights_mib", [64, 512])
def test_memory_is_bounded(tmp_path: Path, weights_mib: int) -> None:
    """A tenth of the weights changes; the bounds are the same for all sizes."""
    torch.manual_seed(0)
    old = torch.randn(weights_mib << 19).bfloat16()
    new = torch.where(torch.rand(old.shape) < 0.1, old + 1, old)
    for step, weights in enumerate((old, new)):
        commit(tmp_path / "run", step, {"model.safetensors": {"w": weights}})
    chain = tmp_path / "chain"
    ft_ckpt.publish(tmp_path / "run/checkpoint-0", str(chain), delta=True)
    with peak_memory() as publish_peak:
        ft_ckpt.publish(tmp_path / "run/checkpoint-1", str(chain), delta=True)
    with peak_memory() as pull_peak:
        ft_ckpt.pull(chain / "checkpoint-1", tmp_path / "out")
    assert kinds(chain) == ["full", "delta"]
    assert 8 < publish_peak.mib < 100, "two slices of 4 MiB, and a piece of the delta"
    # eight blocks of 16 MiB; of 8 MiB three pieces, and one more for each of six readers
    assert 24 < pull_peak.mib < 300
