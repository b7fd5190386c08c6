"""Chains of deltas of TRL: each step is what its trainer held, or an error names the file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import EngineFiles
from safetensors.torch import load_file, save_file

import ft_ckpt
from ft_ckpt.cli import run_command
from ft_ckpt.engines.foreign import rebuild_foreign
from ft_ckpt.errors import CheckpointError, CorruptError, LoadError, MissingError

Tensors = dict[str, torch.Tensor]
NORM = "model.norm.weight"


def gaps(positions: torch.Tensor) -> torch.Tensor:
    """Positions as TRL encodes them: the gaps between them, in 16 bits if all fit."""
    before = torch.cat([torch.tensor([-1]), positions[:-1]])
    found = positions - before - 1
    return found.to(torch.uint16 if int(found.max()) <= 0xFFFF else torch.uint32)


def write_anchor(chain: Path, number: int, weights: Tensors) -> None:
    (chain / "anchors").mkdir(parents=True, exist_ok=True)
    metadata = {"sparse": "False", "model_version": str(number), "encoding": "gap_delta"}
    save_file(weights, chain / f"anchors/step_{number:06d}.safetensors", metadata)


def write_delta(chain: Path, number: int, old: Tensors, new: Tensors, form: str) -> None:
    (chain / "deltas").mkdir(parents=True, exist_ok=True)
    tensors: Tensors = {}
    for name, values in new.items():
        positions = (values.view(torch.int16) != old[name].view(torch.int16)).flatten().nonzero().flatten()
        if len(positions):
            ending = (".indices", ".values") if form == "indices" else (".idx", ".val")
            tensors[name + ending[0]] = gaps(positions) if form == "gap_delta" else positions.to(torch.int32)
            tensors[name + ending[1]] = values.flatten()[positions].clone()
    metadata = {"sparse": "True", "model_version": str(number)}
    metadata |= {} if form == "indices" else {"encoding": form}
    save_file(tensors or {"__empty_delta__": torch.zeros(1)}, chain / f"deltas/step_{number:06d}.safetensors", metadata)


def chain_of(files: EngineFiles, chain: Path, form: str, share: float = 0.001) -> list[Tensors]:
    """Seven steps with anchors at 1 and 5; the weights of each."""
    torch.manual_seed(0)
    weights = [load_file(files.weights[0] / "model.safetensors")]
    write_anchor(chain, 1, weights[0])
    for number in range(2, 8):
        old = weights[-1]
        new = {name: torch.where(torch.rand(each.shape) < share, each * 1.5, each) for name, each in old.items()}
        new = old if number == 3 else new  # a step that changes nothing
        write_delta(chain, number, old, new, form)
        if number == 5:
            write_anchor(chain, 5, new)
        weights.append(new)
    return weights


@pytest.mark.sample("indices", "gap_delta")
@pytest.mark.parametrize("form", ["indices", "raw", "gap_delta"])
def test_each_step_is_rebuilt(files: EngineFiles, tmp_path: Path, form: str) -> None:
    weights = chain_of(files, tmp_path / "chain", form, 0.00001 if form == "gap_delta" else 0.001)
    for number, kind in ((1, "anchors"), (2, "deltas"), (4, "deltas"), (5, "deltas"), (7, "deltas")):
        out = tmp_path / f"out-{number}"
        rebuild_foreign(tmp_path / f"chain/{kind}/step_{number:06d}.safetensors", out, files.base)
        found = load_file(out / "model.safetensors")
        assert found.keys() == weights[number - 1].keys()
        for name, each in weights[number - 1].items():
            assert torch.equal(found[name].view(torch.int16), each.view(torch.int16)), name
        assert (out / "config.json").exists()
        assert ft_ckpt.verify(out).ok
    ft_ckpt.load_model(tmp_path / "out-7")


def test_a_model_with_a_tied_head(files: EngineFiles, tmp_path: Path) -> None:
    weights = load_file(files.qwen / "model.safetensors")
    write_anchor(tmp_path, 1, weights)
    new = {name: each * 2 for name, each in weights.items()}
    write_delta(tmp_path, 2, weights, new, "raw")
    rebuild_foreign(tmp_path / "deltas/step_000002.safetensors", tmp_path / "out", files.qwen)
    found = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(found[name], each) for name, each in new.items())


def test_what_is_rebuilt_is_no_more_open_than_its_chain(files: EngineFiles, tmp_path: Path) -> None:
    chain_of(files, tmp_path / "chain", "raw")
    for path in (tmp_path / "chain").rglob("*.safetensors"):
        path.chmod(0o600)
    rebuild_foreign(tmp_path / "chain/deltas/step_000002.safetensors", tmp_path / "out", files.base)
    assert {path.stat().st_mode & 0o077 for path in (tmp_path / "out").iterdir()} == {0}


def rewrite(path: Path, change: Callable[[Tensors, dict[str, str]], Any]) -> None:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        metadata = dict(file.metadata())
    tensors = load_file(path)
    change(tensors, metadata)
    save_file(tensors, path, metadata)


def shift(tensors: Tensors, by: int) -> None:
    name = next(name for name in tensors if name.endswith(".indices"))
    tensors[name] = tensors[name] + by


BROKEN: dict[str, tuple[Callable[[Path], Any], type[CheckpointError], str]] = {
    "missing delta": (lambda chain: (chain / "deltas/step_000003.safetensors").unlink(), CorruptError, "step 3: not"),
    "missing anchor": (lambda chain: (chain / "anchors/step_000001.safetensors").unlink(), CorruptError, "no anchor"),
    "missing step": (lambda chain: (chain / "deltas/step_000004.safetensors").unlink(), MissingError, "step_000004"),
    "another step": (
        lambda chain: rewrite(
            chain / "deltas/step_000003.safetensors", lambda _, metadata: metadata.update(model_version="2")
        ),
        CorruptError, "step_000003.safetensors: model_version 2",
    ),
    "positions outside": (
        lambda chain: rewrite(chain / "deltas/step_000002.safetensors", lambda found, _: shift(found, 1 << 28)),
        CorruptError, "step_000002.*: positions that are not ascending inside",
    ),
    "negative positions": (
        lambda chain: rewrite(chain / "deltas/step_000002.safetensors", lambda found, _: shift(found, -(1 << 28))),
        CorruptError, "step_000002.*: positions that are not ascending inside",
    ),
    "values without positions": (
        lambda chain: rewrite(
            chain / "deltas/step_000002.safetensors",
            lambda found, _: found.update({"model.norm.weight.val": torch.ones(1, dtype=torch.bfloat16)}),
        ),
        CorruptError, "model.norm.weight.val: expected positions and values, each once",
    ),
    "positions in floats": (
        lambda chain: rewrite(
            chain / "deltas/step_000002.safetensors",
            lambda found, _: found.update({name: each.float() for name, each in found.items() if "indices" in name}),
        ),
        CorruptError, "indices: positions in torch.float32, expected integers",
    ),
    "another encoding": (
        lambda chain: rewrite(
            chain / "deltas/step_000002.safetensors", lambda _, metadata: metadata.update(encoding="nvcomp_cascaded")
        ),
        LoadError, "encoded as 'nvcomp_cascaded'",
    ),
    "another model": (
        lambda chain: rewrite(chain / "anchors/step_000001.safetensors", lambda found, _: found.pop(NORM)),
        LoadError, "model.norm.weight: not in the anchor",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_chain_is_refused_by_name(files: EngineFiles, tmp_path: Path, name: str) -> None:
    chain_of(files, tmp_path / "chain", "indices")
    do, kind, expected = BROKEN[name]
    do(tmp_path / "chain")
    entry = tmp_path / "chain/deltas/step_000004.safetensors"
    with pytest.raises(kind, match=expected):
        rebuild_foreign(entry, tmp_path / "out", files.base)
    assert not (tmp_path / "out").exists()


def test_the_command(files: EngineFiles, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chain_of(files, tmp_path / "chain", "raw")
    entry = tmp_path / "chain/deltas/step_000002.safetensors"
    assert run_command(["pull", str(entry), str(tmp_path / "out"), "--base", str(files.base)]) == 0
    assert "step_000002.safetensors -> " in capsys.readouterr().out
