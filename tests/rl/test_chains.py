"""Chains of deltas: a run appends to one, and a server on another host gets each entry, rebuilt."""

import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import EngineFiles
from engine_models import base_model, tokenizer
from engine_server import serving
from safetensors.torch import load_file, save_file

import ft_ckpt
from ft_ckpt import CheckpointSaver, ServerOptions
from ft_ckpt.checkpoint.catalog import discover
from ft_ckpt.checkpoint.manifest import manifest_to_json, read_manifest
from ft_ckpt.cli import run_command
from ft_ckpt.errors import ConfigError, CorruptError, EngineError, NameTakenError
from ft_ckpt.extensions.rl.publishing import PublishReport, follow_run
from ft_ckpt.storage.digests import read_record
from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage.places import open_place

WEIGHTS = "model.safetensors"


def grow(files: EngineFiles, run: Path, step: int) -> Path:
    """The next checkpoint of a run: one element in a hundred is another one."""
    before = run / f"checkpoint-{step - 1}" if step > 1 else files.weights[0]
    path = shutil.copytree(before, run / f".{step}", ignore=shutil.ignore_patterns(".ft_ckpt*"))
    torch.manual_seed(step)
    weights = {
        name: torch.where(torch.rand(each.shape) < 0.01, each * 1.01, each)
        for name, each in load_file(path / WEIGHTS).items()
    }
    save_file(weights, path / WEIGHTS, metadata={"format": "pt"})
    new = read_record(LocalStore(path), WEIGHTS)
    manifest = read_manifest(open_place(path))
    records = tuple(new if file.path == WEIGHTS else file for file in manifest.files)
    created = f"2026-01-01T00:00:00.{step:06}+00:00"
    manifest = replace(manifest, files=records, step=step, created=created, run_id="a")
    (path / "ft_ckpt.json").write_text(manifest_to_json(manifest))
    return path.rename(run / f"checkpoint-{step}")


def append(path: Path, chain: Path | str) -> PublishReport:
    return ft_ckpt.publish(path, str(chain), delta=True)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["folder", "bucket"])
def test_a_server_follows_a_chain_while_a_run_appends_to_it(
    files: EngineFiles, tmp_path: Path, place: str, request: pytest.FixtureRequest
) -> None:
    chain = str(tmp_path / "shared/policy")
    if place == "bucket":
        request.getfixturevalue("s3")
        chain = "s3://bucket/policy"
    run, stage, reports, troubles = (
        tmp_path / "run",
        tmp_path / "stage",
        list[PublishReport](),
        list[str](),
    )

    def train() -> None:
        for step in range(1, 6):
            append(grow(files, run, step), chain)

    with serving(files.base) as engine:
        trainer = threading.Thread(target=train)
        trainer.start()
        options = ServerOptions(url=engine.url, stage=stage, timeout_seconds=20)
        follow_run(
            open_place(chain),
            options,
            idle_seconds=3,
            poll_seconds=0.05,
            on_published=reports.append,
            on_trouble=troubles.append,
        )
        trainer.join()
        assert troubles == []
        assert reports[-1].version.startswith("policy/checkpoint-5#")
        assert engine.weight_version == reports[-1].version
        assert engine.weights_path == str(stage / "policy/checkpoint-5")
        assert "parameters equal to the files" in reports[-1].servers[0].checked
    assert [info.manifest.kind for info in discover(open_place(chain))] == ["full", *["delta"] * 4]
    assert len(list((stage / "policy").glob("checkpoint-*"))) <= 2
    for path in (run / "checkpoint-5").iterdir():
        if path.name != "ft_ckpt.json":
            assert (stage / "policy/checkpoint-5" / path.name).read_bytes() == path.read_bytes()


def test_a_server_gets_back_what_it_held(files: EngineFiles, tmp_path: Path) -> None:
    """The entry before is still in the stage when the load of the next one fails, and after two
    failures.
    """
    chain, stage = tmp_path / "chain", tmp_path / "stage"
    for step in (1, 2, 3, 4):
        append(grow(files, tmp_path / "run", step), chain)
    with serving(files.base) as engine:
        ft_ckpt.publish(chain / "checkpoint-1", engine.url, stage=stage)
        held = ft_ckpt.publish(chain / "checkpoint-2", engine.url, stage=stage).version
        for step in (3, 4):
            engine.fail("/collective_rpc", 500)
            with pytest.raises(EngineError, match=r"holds chain/checkpoint-2#.* again"):
                ft_ckpt.publish(chain / f"checkpoint-{step}", engine.url, stage=stage)
            assert engine.weight_version == held
            engine.faults.clear()
        assert ft_ckpt.publish(chain / "checkpoint-4", engine.url, stage=stage).servers[0].is_new
    assert sorted(path.name for path in (stage / "chain").glob("c*")) == [
        "checkpoint-3",
        "checkpoint-4",
    ]


def test_an_entry_has_one_version_on_every_host(files: EngineFiles, tmp_path: Path) -> None:
    chain = tmp_path / "chain"
    for step in (1, 2, 3):
        append(grow(files, tmp_path / "run", step), chain)
    with serving(files.base) as one, serving(files.base) as other:
        ft_ckpt.publish(chain / "checkpoint-2", one.url, stage=tmp_path / "one")
        versions = {
            ft_ckpt.publish(chain / "checkpoint-3", engine.url, stage=tmp_path / name).version
            for name, engine in (("one", one), ("other", other))
        }
    assert len(versions) == 1


def test_other_folders_in_the_stage_stay(files: EngineFiles, tmp_path: Path) -> None:
    """Of a run of the same name, with its training state, and of entries that the chain no longer
    has.
    """
    chain, stage = tmp_path / "chain", tmp_path / "stage"
    for step in (1, 2, 3, 4):
        append(grow(files, tmp_path / "run", step), chain)
    shutil.copytree(files.weights[1], stage / "chain/mine")
    with serving(files.base) as engine:
        for step in (1, 2, 3, 4):
            ft_ckpt.publish(chain / f"checkpoint-{step}", engine.url, stage=stage)
    assert sorted(path.name for path in (stage / "chain").iterdir()) == [
        "checkpoint-3",
        "checkpoint-4",
        "mine",
    ]


def test_a_stage_with_the_run_itself_replaces_no_checkpoint_with_its_training_state(
    files: EngineFiles, tmp_path: Path
) -> None:
    run, chain = tmp_path / "runs/grpo", tmp_path / "shared/grpo"
    model = base_model("llama", 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with CheckpointSaver(None, run, tokenizer=tokenizer(), every=1) as saver:
        saver.register(model=model, optimizer=optimizer)
        for _ in range(3):
            model.model.norm.weight.grad = torch.ones_like(model.model.norm.weight)
            optimizer.step()
            append(Path(saver.step().path), chain)
    before = files_in(run)
    with serving(files.base) as engine:
        for step in (2, 3):
            with pytest.raises(
                NameTakenError, match="not replaced; expected another folder as stage="
            ):
                ft_ckpt.publish(chain / f"checkpoint-{step}", engine.url, stage=tmp_path / "runs")
        assert not engine.changes
    assert files_in(run) == before


def test_a_stage_with_the_run_itself_deletes_no_checkpoint_of_weights_alone(
    files: EngineFiles, tmp_path: Path
) -> None:
    run, chain = tmp_path / "runs/grpo", tmp_path / "shared/grpo"
    for step in (1, 2, 3, 4):
        append(grow(files, run, step), chain)
    before = files_in(run)
    with serving(files.base) as engine:
        for step in (1, 2, 3, 4):
            ft_ckpt.publish(chain / f"checkpoint-{step}", engine.url, stage=tmp_path / "runs")
        # it is the same, and read where it is
        assert engine.weights_path == str(run / "checkpoint-4")
    assert files_in(run) == before


def files_in(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_stage_of_another_run_is_named(files: EngineFiles, tmp_path: Path) -> None:
    for step in (1, 2):
        append(grow(files, tmp_path / "run", step), tmp_path / "chain")
    shutil.copytree(files.weights[1], tmp_path / "stage/chain/checkpoint-2")
    with serving(files.base) as engine:
        with pytest.raises(NameTakenError, match="not replaced; expected another folder as stage="):
            ft_ckpt.publish(tmp_path / "chain/checkpoint-2", engine.url, stage=tmp_path / "stage")
        assert not engine.changes


def test_a_broken_entry_is_skipped_until_the_next_anchor(
    files: EngineFiles, tmp_path: Path
) -> None:
    chain, troubles, steps = tmp_path / "chain", list[str](), list[str]()
    for step in (1, 2):
        append(grow(files, tmp_path / "run", step), chain)
    shutil.rmtree(chain / "checkpoint-1")

    def repair(text: str) -> None:
        troubles.append(text)
        ft_ckpt.publish(grow(files, tmp_path / "run", 3), str(chain), delta=True, anchor_every=1)

    with serving(files.base) as engine:
        options = ServerOptions(url=engine.url, stage=tmp_path / "stage")
        follow_run(
            open_place(chain),
            options,
            idle_seconds=0.5,
            poll_seconds=0.05,
            on_trouble=repair,
            on_published=lambda report: steps.append(Path(report.path).name),
        )
    assert steps == ["checkpoint-3"]
    assert len(troubles) == 1
    assert (
        "checkpoint-2: based on checkpoint-1, which is not in the chain; publish an anchor"
        in troubles[0]
    )


def test_the_stage_is_not_the_chain(files: EngineFiles, tmp_path: Path) -> None:
    for step in (1, 2):
        append(grow(files, tmp_path / "run", step), tmp_path / "chain")
    with (
        serving(files.base) as engine,
        pytest.raises(ConfigError, match="stage= is where the chain is"),
    ):
        ft_ckpt.publish(tmp_path / "chain/checkpoint-2", engine.url, stage=tmp_path)


def test_a_saver_appends_what_it_saves(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(200, 200)
    with CheckpointSaver(
        None, tmp_path / "run", every=1, publish={"url": str(tmp_path / "chain"), "delta": True}
    ) as saver:
        saver.register(model=model)
        kinds = []
        for _ in range(3):
            with torch.no_grad():
                model.weight[0] += 1
            # waits, or the next one may take its place
            kinds.append(saver.step().publish.result().kind)
    assert kinds == ["anchor", "delta", "delta"]
    assert [info.name for info in discover(open_place(tmp_path / "chain"))] == [
        f"checkpoint-{step}" for step in (1, 2, 3)
    ]


def test_settings_of_a_chain(tmp_path: Path) -> None:
    goal = {"url": "s3://bucket/chain", "delta": True, "anchor_every": 5}
    assert ServerOptions(**goal) == ServerOptions(
        url=["s3://bucket/chain"], delta=True, anchor_every=5
    )
    wrong: list[Any] = [
        {"url": "http://a:1", "delta": True},
        {"url": str(tmp_path)},
        {"url": ["a", "b"], "delta": True},
    ]
    for each in wrong:
        with pytest.raises(ConfigError):
            ServerOptions(**each)
    with pytest.raises(ConfigError, match="publish="):
        CheckpointSaver(None, publish=wrong[0])


def test_the_commands(
    files: EngineFiles, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, chain = tmp_path / "run", tmp_path / "chain"
    grow(files, run, 1)
    assert run_command(["publish", str(run / "checkpoint-1"), str(chain), "--delta"]) == 0
    assert "anchor" in capsys.readouterr().out
    path = grow(files, run, 2)
    assert run_command(["publish", "--follow", str(run), str(chain), "--delta", "--idle", "0"]) == 0
    assert "checkpoint-1" in capsys.readouterr().out
    assert run_command(["pull", str(chain / "checkpoint-2"), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (path / WEIGHTS).read_bytes()
    (chain / "checkpoint-1" / WEIGHTS).unlink()
    with pytest.raises(CorruptError, match=r"checkpoint-1: model\.safetensors: missing"):
        ft_ckpt.pull(chain / "checkpoint-2", tmp_path / "elsewhere/again")
