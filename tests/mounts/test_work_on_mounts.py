"""What several nodes do on network file systems besides saves: reuse, prune, copy, lease, hand in.

The tests' process is a node of its own, on a client that no rank has.
"""

import threading
import time
from pathlib import Path

import models
import pytest
import torch
import torch.distributed as dist
from commands import ft_ckpt as command
from compare import assert_same_tensors
from exact_runs import live_model, saver_of, train
from network_nodes import Nodes, run_on
from on_ranks import RANK
from safetensors.torch import load_file, save_file
from wrappers import WRAPPERS, truth

import ft_ckpt
from ft_ckpt import CheckpointSaver, Writer, load_model, verify
from ft_ckpt.checkpoint import open_checkpoint
from ft_ckpt.checkpoint.manifest import read_manifest
from ft_ckpt.errors import LeaseTakenError
from ft_ckpt.runs.folder import lease as run_lease
from ft_ckpt.storage.places import open_place

pytestmark = pytest.mark.slow
MODEL = "llama"
LEASE_SECONDS = 60  # after which a lease that is not renewed is taken over
WAIT_SECONDS = 200


def save_with_frozen(nodes: Nodes) -> None:
    """Two checkpoints of a model of which one layer is trained between."""
    model = models.build("wide")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "model.norm.weight")
    with nodes.joined() as place:
        live = WRAPPERS["ddp"](model)
        with saver_of(live, place / "frozen", reuse_frozen="on", each_rank_writes="on") as saver:
            for step in (1, 2):
                with torch.no_grad():
                    model.get_parameter("model.norm.weight").add_(step)
                saver.save(live.model, step=step)
        tensors = truth(live)
        if RANK == 0:
            contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
            save_file(contiguous, nodes.local / "frozen.safetensors")
        dist.barrier()


def test_frozen_files_are_reused(nodes):
    run_on(nodes, 2, save_with_frozen)
    second = nodes.reader / "frozen" / "checkpoint-2"
    records = read_manifest(open_place(second)).files
    linked = [record.path for record in records if record.linked]
    assert linked
    written = load_file(nodes.local / "frozen.safetensors")
    read = load_model(second).state_dict()
    assert_same_tensors({name: read[name] for name in written}, written)
    assert command("prune", second.parent, "--last", 1).code == 0
    assert verify(second).problems == ()


def save_steps(nodes: Nodes, run: str, first: int, last: int) -> None:
    with nodes.joined() as place:
        live = live_model("fsdp2", MODEL)
        with saver_of(live, place / run, each_rank_writes="on") as saver:
            for step in range(first, last + 1):
                saver.save(live.model, step=step)


def run_command(nodes: Nodes, *words: str) -> tuple[int, str]:
    """Exit code and output of a command, in the folder of the file system."""
    with nodes.joined() as place:
        words = [word.replace("RUNS", str(place)) for word in words]
        answer = command(*words)
        return answer.code, answer.out + answer.err


def names_in(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir() if not path.name.startswith("."))


def test_commands_of_a_node_beside_a_reader_on_another(nodes):
    run_on(nodes, 2, save_steps, "commands", 1, 3)
    run = nodes.reader / "commands"
    assert ft_ckpt.latest(run) == run / "checkpoint-3"  # the client lists the folder
    with open_checkpoint(open_place(run / "checkpoint-1")) as checkpoint:
        for words in (
            ["prune", "RUNS/commands", "--last", "1"],
            ["cp", "RUNS/commands/checkpoint-1", "RUNS/copied"],
            ["sync", "RUNS/commands", "RUNS/synced"],
            ["verify", "RUNS/commands"],
        ):
            ((code, output),) = run_on(nodes, 1, run_command, *words)
            assert code == 0, output
        assert checkpoint.find_problems(deep=True) == ()
    node = nodes.clients[2]  # not cached by any command
    assert names_in(node / "commands") == ["checkpoint-1", "checkpoint-3"]
    assert names_in(node / "synced") == ["checkpoint-1", "checkpoint-3"]
    assert verify(nodes.reader / "copied").problems == ()
    assert ft_ckpt.latest(run) == run / "checkpoint-3"
    if nodes.cache_seconds < LEASE_SECONDS:  # else a client may still show the reader's lease
        prune_by_a_node(nodes)
    run_on(nodes, 2, save_steps, "commands", 4, 5)
    assert command("prune", run, "--last", 1).code == 0
    assert_latest(run, "checkpoint-5", nodes.cache_seconds)


def prune_by_a_node(nodes: Nodes) -> None:
    """Nobody reads any more: all but the newest checkpoint go."""
    time.sleep(nodes.cache_seconds)
    ((code, output),) = run_on(nodes, 1, run_command, "prune", "RUNS/commands", "--last", "1")
    assert code == 0, output
    ((code, output),) = run_on(nodes, 1, run_command, "ls", "RUNS/commands")
    assert code == 0
    assert "checkpoint-3" in output
    assert "checkpoint-1" not in output


def assert_latest(run: Path, name: str, cache_seconds: int) -> None:
    """The newest checkpoint of the run has that name, as soon as a client may know of it."""
    end = time.monotonic() + cache_seconds + 5
    newest = ft_ckpt.latest(run)
    while newest != run / name and time.monotonic() < end:
        time.sleep(1)
        newest = ft_ckpt.latest(run)
    assert newest == run / name


def trainer(run: Path) -> CheckpointSaver:
    model = torch.nn.Linear(2, 2)
    saver = CheckpointSaver(None, run)
    saver.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    return saver


def stepped(saver: CheckpointSaver) -> None:
    saver.step({"loss": 1.0})
    saver.save_state()


def train_once(nodes: Nodes, run: str) -> tuple[str, float]:
    """The reason why this node may not train there, "" for none; the seconds until then."""
    begun = time.monotonic()
    with nodes.joined() as place, trainer(place / run) as saver:
        try:
            saver.resume()
            stepped(saver)
        except LeaseTakenError as error:
            return str(error), time.monotonic() - begun
    return "", time.monotonic() - begun


def test_the_lease_of_a_run_is_seen_on_another_node(nodes):
    run = nodes.reader / "leased"
    with trainer(run) as first:
        stepped(first)
        ((reason, seconds),) = run_on(nodes, 1, train_once, "leased")
        assert "trains into it" in reason
        assert seconds < LEASE_SECONDS + 5
    ((reason, seconds),) = run_on(nodes, 1, train_once, "leased")
    assert reason == ""
    assert seconds < LEASE_SECONDS / 2 + nodes.cache_seconds


def test_the_lease_of_a_run_is_taken_over_when_it_is_not_renewed(nodes):
    run = nodes.reader / "expired"
    first = trainer(run)
    stepped(first)
    run_lease._of_process[str(run)].stop()  # as if its process were stopped
    ((reason, seconds),) = run_on(nodes, 1, train_once, "expired")
    assert reason == ""
    assert seconds >= LEASE_SECONDS


def train_with_a_writer(nodes: Nodes, run: str) -> None:
    with nodes.joined() as place:
        live = live_model("fsdp2", MODEL)
        with saver_of(live, place / run) as saver:
            saver.resume()
            saver.invite("replay", timeout_seconds=WAIT_SECONDS)
            for step in range(2):
                train(live, saver, step, 1)
                saver.save_state()


def test_a_writer_on_another_node_hands_in_its_part(nodes):
    run = nodes.reader / "written"
    ended = []

    def provide() -> None:
        with Writer(run, "replay", timeout_seconds=WAIT_SECONDS) as writer:
            writer.provide(lambda: {"cursor": 7})
            ended.append(writer.wait(WAIT_SECONDS))

    thread = threading.Thread(target=provide)
    thread.start()
    run_on(nodes, 2, train_with_a_writer, "written")
    thread.join()
    assert ended == [True]
    for step in (1, 2):
        checkpoint = nodes.clients[2] / "written" / f"checkpoint-{step}"
        assert verify(checkpoint).problems == ()
        files = [record.path for record in read_manifest(open_place(checkpoint)).files]
        assert [path for path in files if path.startswith("state/writers/replay/")]
