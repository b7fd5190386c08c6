"""One checkpoint, many writers: processes beside the trainer hand in their parts, and get them
back.
"""

import json
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import faults
import models
import pytest
import torch
from s3_server import S3

import ft_ckpt
import ft_ckpt.extensions.rl.writers.writer as writer_module
from ft_ckpt import CheckpointSaver, Writer
from ft_ckpt.checkpoint.catalog import CheckpointInfo
from ft_ckpt.checkpoint.commit import delete_checkpoint, delete_state
from ft_ckpt.checkpoint.manifest import read_manifest
from ft_ckpt.cli import views
from ft_ckpt.errors import (
    CheckpointError,
    ConfigError,
    CorruptError,
    NoSpaceError,
    TargetError,
    WriterError,
)
from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage.places import open_place

FORK = multiprocessing.get_context("fork")


def trainer(folder: Any, **settings: Any) -> CheckpointSaver:
    model = models.build("partly_frozen")
    saver = CheckpointSaver(None, folder, **settings)
    saver.register(
        model=model,
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
    )
    return saver


def stepped(saver: CheckpointSaver, step: int) -> Any:
    saver.step({"loss": 1.0}, step=step)
    return saver.save_state()


@contextmanager
def process(work: Callable[..., None], *arguments: Any) -> Iterator[Any]:
    """`work` in a process of its own, which must end well within the block unless the block kills
    it.
    """

    def run() -> None:
        try:
            work(*arguments)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    child = FORK.Process(target=run)
    child.start()
    try:
        yield child
        child.join(30)
        assert child.exitcode in (0, -signal.SIGKILL), child.exitcode
    finally:
        child.kill()
        child.join()


def provide_until_over(folder: Any, name: str, state: Any, **how: Any) -> None:
    with Writer(folder, name, timeout_seconds=30, **how) as writer:
        writer.provide(lambda: state)
        assert writer.wait(30), "the trainer's close ends the session"


def test_parts_of_one_checkpoint_and_back(tmp_path: Path) -> None:
    state = {"cursor": 17, "weights": torch.arange(4.0), "name": "ünï"}
    with process(provide_until_over, tmp_path, "replay", state), trainer(tmp_path) as saver:
        assert saver.resume().step == 0
        saver.invite("replay", "rollout")
        with Writer(tmp_path, "rollout") as writer:
            assert writer.resume() is None
            writer.put(5, {"seed": 1}, files={"log/a.txt": b"sampled", "b.bin": __file__})
            report = stepped(saver, 5)
            assert report.path == tmp_path / "checkpoint-5"
            part = writer.resume(tmp_path / "back")
            assert (part.step, part.state, part.path) == (5, {"seed": 1}, report.path)
            assert {path.name for path in part.files["rollout"]} == {"a.txt", "b.bin"}
            assert (tmp_path / "back/rollout/b.bin").read_bytes() == Path(__file__).read_bytes()
    assert ft_ckpt.verify(report.path).ok
    files = {
        file.path for file in read_manifest(open_place(report.path)).files if "writers" in file.path
    }
    parts = [
        "replay/state.safetensors",
        "rollout/b.bin",
        "rollout/log/a.txt",
        "rollout/state.safetensors",
    ]
    assert files == {f"state/writers/{path}" for path in parts}
    assert not list((tmp_path / ".ft_ckpt-writers").rglob("*.*")), "nothing is left of the session"
    # A run that goes on gets what was handed in.
    with trainer(tmp_path) as saver:
        assert saver.resume("must").step == 5
        saver.invite("replay", "rollout")
        part = Writer(tmp_path, "replay").resume()
        assert part is not None
        assert torch.equal(part.state.pop("weights"), state.pop("weights"))
        assert part.state == state


def test_a_copy_keeps_the_parts_and_a_push_leaves_them_out(
    tmp_path: Path, s3: S3, capsys: pytest.CaptureFixture[str]
) -> None:
    with trainer(tmp_path / "run") as saver:
        saver.invite("replay")
        Writer(tmp_path / "run", "replay").put(1, [1, 2])
        stepped(saver, 1)
    path = tmp_path / "run/checkpoint-1"
    views.show_checkpoint(
        CheckpointInfo(LocalStore(path), read_manifest(open_place(path))), as_json=False
    )
    assert "replay" in capsys.readouterr().out.partition("parts of writers")[2]
    ft_ckpt.copy(path, tmp_path / "copy")
    assert ft_ckpt.load(tmp_path / "copy/state/writers/replay/state.safetensors") == [1, 2]
    ft_ckpt.push(path, "s3://bucket/pushed")
    assert not [name for name in s3.names() if "state/" in name]
    assert ft_ckpt.verify("s3://bucket/pushed").ok
    delete_state(path)
    assert not (path / "state").exists()
    assert ft_ckpt.verify(path).ok


def test_in_the_background_only_the_commit_waits(tmp_path: Path) -> None:
    with trainer(tmp_path, background=True) as saver:
        saver.invite("slow")
        writer = Writer(tmp_path, "slow")
        pending = stepped(saver, 1)
        time.sleep(0.3)
        assert not pending.done
        assert writer.asked == 1
        writer.put(1, "late")
        assert pending.result(20).path == tmp_path / "checkpoint-1"
        assert writer.asked is None


def test_the_end_of_the_trainer_waits_for_a_save_in_the_background(tmp_path: Path) -> None:
    with trainer(tmp_path, background=True) as saver:
        saver.invite("replay")
        writer = Writer(tmp_path, "replay")
        pending = stepped(saver, 1)
        threading.Timer(0.5, lambda: writer.put(1, "late")).start()
    assert pending.result().step == 1
    assert ft_ckpt.load(tmp_path / "checkpoint-1/state/writers/replay/state.safetensors") == "late"


def test_who_is_missing_is_named_and_nothing_is_committed(tmp_path: Path) -> None:
    with trainer(tmp_path) as saver:
        saver.invite("replay", rollout=2, optional=["rollout"], timeout_seconds=0.5)
        Writer(tmp_path, "rollout", index=1).put(1, "one")
        with pytest.raises(
            WriterError, match=r"step 1: writer replay: has not joined within 0\.5 s"
        ):
            stepped(saver, 1)
        assert not (tmp_path / "checkpoint-1").exists()
        replay = Writer(tmp_path, "replay")
        with pytest.raises(
            WriterError, match=r"writer replay: process \d+ on .* handed in nothing within 0\.5 s"
        ):
            stepped(saver, 2)
        replay.put(3, "three")
        report = stepped(saver, 3)
        assert (
            [note for note in report.notes if "writer" in note]
            == [
                note
                for note in report.notes
                if note.startswith("writer rollout-") and "left out" in note
            ]
            != []
        )


def die(folder: Path, seconds: float) -> None:
    Writer(folder, "replay", timeout_seconds=30)
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_writer_that_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    with trainer(tmp_path) as saver:
        saver.invite("replay", timeout_seconds=60)
        with process(die, tmp_path, 0.3):
            begun = time.monotonic()
            with pytest.raises(
                WriterError,
                match=r"writer replay: (its process \d+ on .* has ended|has not joined)",
            ):
                stepped(saver, 1)
            assert time.monotonic() - begun < 30
        with Writer(tmp_path, "replay") as again:  # takes the place of the one that was killed
            again.put(2, "two")
            assert stepped(saver, 2).step == 2


@pytest.mark.filterwarnings("ignore:.*handed in nothing")
def test_an_error_of_the_state_function_is_the_trainers(tmp_path: Path) -> None:
    with trainer(tmp_path) as saver:
        saver.invite("replay", timeout_seconds=60)
        writer = Writer(tmp_path, "replay")
        for step, state, error in (
            (1, lambda: 1 / 0, "ZeroDivisionError"),
            (2, object, "SelectionError"),
            (3, lambda: None, "WriterError"),
        ):
            writer.provide(state)
            with pytest.raises(
                WriterError, match=f"writer replay: its state or files function raised {error}"
            ):
                stepped(saver, step)


def test_a_full_disk_of_the_trainer_is_no_fault_of_a_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries, copied = [], LocalStore.copy

    def full_once(store: LocalStore, name: str, other: str, source: Any) -> bool:
        if "writers" in other and not tries:
            tries.append(other)
            raise NoSpaceError(f"{other}: no room on its device")
        return copied(store, name, other, source)

    monkeypatch.setattr(LocalStore, "copy", full_once)
    with trainer(tmp_path, keep=1, when_full="prune") as saver:
        for step in (1, 2):
            stepped(saver, step)
        saver.invite("replay", optional=["replay"])
        Writer(tmp_path, "replay").put(3, [1])
        report = stepped(saver, 3)
    assert tries
    assert not [note for note in report.notes if "left out" in note]
    assert ft_ckpt.load(report.path / "state/writers/replay/state.safetensors") == [1]


def test_what_is_handed_in_early_outlasts_the_checkpoint_that_has_its_files(tmp_path: Path) -> None:
    with trainer(tmp_path, keep=1) as saver:
        saver.invite("replay")
        writer = Writer(tmp_path, "replay")
        for step in (1, 2, 3):
            writer.put(step, {"step": step}, files={"data": b"unchanged"})
            if step == 1:
                stepped(saver, step)
        assert stepped(saver, 2).path.exists()
        assert not (tmp_path / "checkpoint-1").exists()
        report = stepped(saver, 3)
    assert (report.path / "state/writers/replay/data").read_bytes() == b"unchanged"


def test_a_file_of_the_name_of_the_list_is_no_list(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, store_file = threading.Event(), writer_module.store_file

    def slow(*arguments: Any) -> Any:
        record = store_file(*arguments)
        stored.set()
        time.sleep(2)  # longer than the pause between looks at a bucket
        return record

    monkeypatch.setattr(writer_module, "store_file", slow)
    with trainer("s3://bucket/run") as saver:
        saver.invite("replay")
        writer = Writer("s3://bucket/run", "replay")
        thread = threading.Thread(
            target=writer.put, args=(1,), kwargs={"files": {"log/handed.json": b"{}"}}
        )
        thread.start()
        assert stored.wait(30)
        stepped(saver, 1)
        thread.join()
    assert "run/checkpoint-1/state/writers/replay/log/handed.json" in s3.names()


@pytest.mark.filterwarnings("ignore:.*handed in nothing")
def test_a_full_disk_of_a_writer_is_no_fault_of_its_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise NoSpaceError("state.safetensors: no room on its device")

    monkeypatch.setattr(writer_module, "save", full)
    with trainer(tmp_path) as saver:
        saver.invite("replay", timeout_seconds=60)
        Writer(tmp_path, "replay").provide(lambda: 1)
        with pytest.raises(
            WriterError, match=r"replay: its files were not written: NoSpaceError: .*no room"
        ):
            stepped(saver, 1)


def test_who_does_not_belong_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WriterError, match=r"no trainer has invited writers within 0\.2 s"):
        Writer(tmp_path, "replay", timeout_seconds=0.2)
    with trainer(tmp_path) as saver:
        token = saver.invite("replay", rollout=2)
        with pytest.raises(
            WriterError, match="writer other is not invited, replay, rollout-0, rollout-1 are"
        ):
            Writer(tmp_path, "other")
        with pytest.raises(WriterError, match="no trainer has invited"):
            Writer(tmp_path, "replay", session="another", timeout_seconds=0.2)
        writer = Writer(tmp_path, "replay", session=token)
        with pytest.raises(WriterError, match=r"writer replay is process \d+"):
            Writer(tmp_path, "replay")
        for rollout in (Writer(tmp_path, "rollout", index=index) for index in range(2)):
            rollout.put(1, rollout.name)
        writer.put(1, "one")
        with pytest.raises(WriterError, match="step 1: handed in before"):
            writer.put(1, "again")
        stepped(saver, 1)
        with pytest.raises(WriterError, match="step 0: committed before"):
            writer.put(0, "older")
        with pytest.raises(WriterError, match="no path for a file"):
            writer.put(2, files={"../x": b""})
        with pytest.raises(WriterError, match="neither a state nor files"):
            writer.put(2)
        with pytest.raises(ConfigError, match="letters"):
            Writer(tmp_path, "a/b")
        with pytest.raises(ConfigError, match="a function"):
            writer.provide()
    assert writer.wait(10)
    with pytest.raises(
        WriterError, match=r"the session is over \(the trainer has ended or begun again\)"
    ):
        writer.put(2, "late")


NO_STEPS = [None, 2.0, True, -1, float("nan"), "3", "../../../outside", [3], 1j]
NO_COUNTS = [None, 2.0, True, 0, "3", [3]]


def test_what_is_no_step_no_index_and_no_count_is_refused_at_once(tmp_path: Path) -> None:
    run = tmp_path / "a/b/run"
    with trainer(run) as saver:
        for count in NO_COUNTS:
            with pytest.raises(ConfigError, match=r"rollout=.*expected the number of writers"):
                saver.invite(rollout=count)  # type: ignore[arg-type]
        for seconds in (None, -1, float("nan"), "3"):
            with pytest.raises(ConfigError, match=r"timeout_seconds=.*expected seconds"):
                saver.invite("replay", timeout_seconds=seconds)  # type: ignore[arg-type]
        for names in (5, [5], b"replay", None):
            with pytest.raises(ConfigError, match=r"invite\(allow=...\).*expected names in a list"):
                saver.invite("replay", allow=names)  # type: ignore[arg-type]
        saver.invite("replay", rollout=4, optional="rollout", timeout_seconds=5)
        for index in (True, -1, 2.0, "../x"):
            with pytest.raises(ConfigError, match=r"index=.*expected the number of the writer"):
                Writer(run, "rollout", index=index, timeout_seconds=1)  # type: ignore[arg-type]
        with Writer(run, "replay") as writer:
            for step in NO_STEPS:
                with pytest.raises(ConfigError, match=r"step=.*expected a non-negative integer"):
                    writer.put(step, {"a": 1})  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match=r"files=.*expected files or bytes by their path"):
                writer.put(3, files="a")  # type: ignore[arg-type]
            assert not [
                path
                for path in tmp_path.rglob("*")
                if "outside" in path.name or "state" in path.name
            ]
            writer.put(3, {"a": 1})
            assert stepped(saver, 3).step == 3


def hold_open(folder: Path, ready: Any, over: Any) -> None:
    with trainer(folder) as saver:
        saver.invite("replay")
        ready.set()
        assert over.wait(30)


def test_one_trainer_at_a_time(tmp_path: Path) -> None:
    ready, over = FORK.Event(), FORK.Event()
    with trainer(tmp_path) as saver:
        with process(hold_open, tmp_path, ready, over) as child:
            assert ready.wait(30)
            with pytest.raises(TargetError, match=rf"process {child.pid} on .* trains this run"):
                saver.invite("replay")
            over.set()
        saver.invite("replay")
    ready.clear()
    over.clear()
    with process(hold_open, tmp_path, ready, over) as child:
        assert ready.wait(30)
        writer = Writer(tmp_path, "replay", timeout_seconds=30)
        child.kill()
        child.join()
        assert writer.wait(10), "the session of a killed trainer is over"
    with trainer(tmp_path) as saver:
        saver.invite("replay")
        Writer(tmp_path, "replay").put(1, "new")
        assert stepped(saver, 1).step == 1


def test_a_resume_begins_a_new_session(tmp_path: Path) -> None:
    with trainer(tmp_path) as saver:
        saver.invite("replay")
        old = Writer(tmp_path, "replay")
        for step in (1, 2):
            old.put(step, step)
            stepped(saver, step)
        saver.resume("checkpoint-1")
        with pytest.raises(WriterError, match=r"the trainer has ended or begun again"):
            old.put(3, "of the future that is gone")
        new = Writer(tmp_path, "replay")
        part = new.resume()
        assert part is not None
        assert (part.step, part.state) == (1, 1)


def test_another_number_of_workers(tmp_path: Path) -> None:
    with trainer(tmp_path) as saver:
        saver.invite(rollout=4)
        for index in range(4):
            Writer(tmp_path, "rollout", index=index).put(1, {"of": index})
        stepped(saver, 1)
    for count, expected in (
        (2, [[0, 2], [1, 3]]),
        (4, [[0], [1], [2], [3]]),
        (5, [[0], [1], [2], [3], []]),
    ):
        with trainer(tmp_path) as saver:
            saver.resume("must")
            saver.invite(rollout=count)
            parts = [Writer(tmp_path, "rollout", index=index).resume() for index in range(count)]
            assert [
                sorted(state["of"] for state in part.states.values()) for part in parts if part
            ] == expected

    def all_to_the_first(parts: Any, writers: Any) -> dict[str, Any]:
        return {writers[0]: parts}

    with trainer(tmp_path) as saver:
        saver.resume("must")
        saver.invite(rollout=2)
        first, second = (
            Writer(tmp_path, "rollout", index=index).resume(rule=all_to_the_first)
            for index in range(2)
        )
        assert first is not None
        assert second is not None
        assert len(first.states) == 4
        with pytest.raises(WriterError, match="4 states"):
            _ = first.state
        with pytest.raises(WriterError, match="0 states"):
            _ = second.state


def test_parts_that_nobody_takes_are_refused_or_allowed_by_name(tmp_path: Path) -> None:
    with trainer(tmp_path) as saver:
        saver.invite("replay")
        Writer(tmp_path, "replay").put(1, 1)
        stepped(saver, 1)
    with trainer(tmp_path) as saver:
        saver.resume("must")
        with pytest.raises(
            WriterError, match="no part of writer queue, the part of replay, which is not invited"
        ):
            saver.invite("queue")
        saver.invite("queue", allow=["queue", "replay"])
        part = Writer(tmp_path, "queue").resume()
        assert part is not None
        assert part.states == {}


def test_unchanged_files_are_stored_once(tmp_path: Path) -> None:
    large = os.urandom(1 << 20)
    (tmp_path / "old.bin").write_bytes(large)
    with trainer(tmp_path / "run") as saver:
        saver.invite("replay")
        writer = Writer(tmp_path / "run", "replay")
        for step in (1, 2, 3):
            writer.put(
                step, {"at": 1}, files={"old.bin": tmp_path / "old.bin", "new.bin": b"%d" % step}
            )
            stepped(saver, step)
    inner = "state/writers/replay"
    files = [
        [tmp_path / f"run/checkpoint-{step}/{inner}" / name for step in (1, 2, 3)]
        for name in ("old.bin", "new.bin")
    ]
    assert [path.stat().st_nlink for path in files[0]] == [3, 3, 3]
    assert [path.read_bytes() for path in files[1]] == [b"1", b"2", b"3"]
    linked = {
        file.path: file.linked
        for file in read_manifest(open_place(tmp_path / "run/checkpoint-3")).files
    }
    assert (linked[f"{inner}/old.bin"], linked[f"{inner}/new.bin"]) == (True, False)
    for step in (1, 2):  # each checkpoint is whole without the others
        delete_checkpoint(tmp_path / f"run/checkpoint-{step}")
    assert ft_ckpt.verify(tmp_path / "run/checkpoint-3").ok


def test_no_damaged_file_is_left_behind(tmp_path: Path) -> None:
    with trainer(tmp_path / "run") as saver:
        saver.invite("replay")
        with Writer(tmp_path / "run", "replay") as writer:
            writer.put(1, {"at": 1}, files={"a.bin": b"right", "b.bin": b"right"})
            report = stepped(saver, 1)
            (file,) = report.path.rglob("b.bin")
            file.chmod(0o644)
            file.write_bytes(b"wrong")
            with pytest.raises(CorruptError, match=r"b\.bin.*digest"):
                writer.resume(tmp_path / "back")
    assert not [path for path in (tmp_path / "back").rglob("*") if path.is_file()]


def test_what_was_handed_in_is_compared(tmp_path: Path) -> None:
    with trainer(tmp_path) as saver:
        saver.invite("replay")
        writer = Writer(tmp_path, "replay")
        writer.put(1, files={"a.bin": b"right"})
        (file,) = (tmp_path / ".ft_ckpt-writers").rglob("a.bin")
        file.write_bytes(b"wrong")
        with pytest.raises(WriterError, match=r"a\.bin: not the bytes that were handed in"):
            stepped(saver, 1)
        writer.put(2, files={"a.bin": b"right"})
        next((tmp_path / ".ft_ckpt-writers").rglob("2/*/handed.json")).write_text(
            '{"files": [["../../x", 1, "d"]]}'
        )
        with pytest.raises(WriterError, match=r"no path of a file|another version"):
            stepped(saver, 2)


def test_in_a_bucket(s3: S3) -> None:
    run = ft_ckpt.open_place("s3://bucket/run")
    with trainer(run) as saver:
        saver.invite("replay", "rollout", timeout_seconds=60)
        replay, rollout = Writer(run, "replay"), Writer(run, "rollout")
        rollout.provide(lambda: {"seed": 3})
        for step in (1, 2):
            replay.put(step, step, files={"same": b"x" * 2000})
            stepped(saver, step)
    assert ft_ckpt.verify(ft_ckpt.Place(run.folder, "checkpoint-2")).ok
    with trainer(run) as saver:
        assert saver.resume("must").step == 2
        saver.invite("replay", "rollout")
        part = Writer(run, "rollout").resume()
        assert part is not None
        assert (part.step, part.state) == (2, {"seed": 3})
    assert not [each.name for each in run.folder.list() if ".ft_ckpt-writers" in each.name]


def test_what_a_writer_cannot_resume(tmp_path: Path) -> None:
    with trainer(tmp_path) as saver:
        saver.invite("replay")
        writer = Writer(tmp_path, "replay")
        writer.put(1, files={"log.txt": b"1"})
        stepped(saver, 1)
        with pytest.raises(
            WriterError, match=r"the part of replay has files; give resume\(\) a folder"
        ):
            writer.resume()
        delete_state(tmp_path / "checkpoint-1")
        with pytest.raises(
            WriterError, match="another checkpoint than the one that the trainer continues from"
        ):
            writer.resume(tmp_path / "back")


def test_a_trainer_whose_session_was_taken_over_commits_nothing(tmp_path: Path) -> None:
    with trainer(tmp_path) as saver:
        saver.invite("replay")
        file = tmp_path / ".ft_ckpt-writers" / "session.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "token": "of another trainer"}))
        with pytest.raises(
            WriterError, match=r"step 1: .*session\.json: process \d+ on .* trains this run"
        ):
            stepped(saver, 1)
        assert not (tmp_path / "checkpoint-1").exists()


def test_where_writers_cannot_be_invited(tmp_path: Path) -> None:
    with trainer(None) as saver, pytest.raises(ConfigError, match="directory of the run"):
        saver.invite("replay")
    with trainer(tmp_path) as saver:
        for wrong in ((), ("a/b",), ("a", "a"), (".hidden",)):
            with pytest.raises(ConfigError, match="expected names"):
                saver.invite(*wrong)
        with pytest.raises(ConfigError, match=r"optional=\['b'\]: not invited"):
            saver.invite("a", optional=["b"])


# Kills and faults


def save_with_part(run: Any, step: int, names: Sequence[str] = ("replay",)) -> None:
    with trainer(run) as saver:
        saver.resume()
        saver.invite(*names, allow=names, timeout_seconds=20)
        writers = [Writer(run, name, timeout_seconds=20) for name in names]
        for writer in writers:
            writer.put(step, step, files={"log.txt": b"%d" % step})
        stepped(saver, step)


def check_newest(run: Any, names: Sequence[str] = ("replay",)) -> int:
    """The newest checkpoint has the parts of its own step, or there is none; its step."""
    with trainer(run) as saver:
        progress = saver.resume()
        saver.invite(*names, allow=names)
        for name in names:
            part = Writer(run, name, timeout_seconds=20).resume(tempfile.mkdtemp())
            assert (part is None) == (progress.resumed_from is None)
            assert part is None or (part.step, part.state) == (progress.step, progress.step)
            assert part is None or part.files[name][0].read_bytes() == b"%d" % progress.step
        return progress.step


def check_killed(folder: Path, world: faults.World) -> None:
    """After a save that is killed at a call to the disk, the next one goes on from what is
    there.
    """
    folder = folder / world.name
    save_with_part(folder, 1)
    world.run(save_with_part, folder, 2)
    assert check_newest(folder) in ((1, 2) if world.is_met else (2,))
    save_with_part(folder, 3)
    assert check_newest(folder) == 3


@pytest.mark.sample("50")
@pytest.mark.parametrize("call", [10, 30, 50])
def test_a_trainer_killed_at_some_calls(tmp_path: Path, call: int) -> None:
    world = faults.World(faults.Disk("killed"), "killed", call)
    check_killed(tmp_path, world)
    assert world.is_met


@pytest.mark.slow
def test_a_trainer_killed_at_every_call(tmp_path: Path) -> None:
    assert faults.try_worlds(partial(check_killed, tmp_path), faults.Disk("killed")).calls > 50


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [{"status": 503, "times": 1}, {"cuts": "after"}, {"cuts": "before"}, {"status": 403}]
)
def test_a_fault_at_every_request_of_two_writers(s3: S3, fault: dict[str, Any]) -> None:
    """A save succeeds or raises; what is committed has the parts of its step, and the next save
    succeeds.
    """
    names = ("replay", "rollout")

    def trial(world: faults.World) -> None:
        run = f"s3://bucket/{world.name}"
        save_with_part(run, 1, names)
        with suppress(CheckpointError, OSError) if world.fault else nullcontext():
            world.run(save_with_part, run, 2, names)
        assert check_newest(run, names) in (1, 2)
        save_with_part(run, 3, names)
        assert check_newest(run, names) == 3

    assert faults.try_worlds(trial, faults.Server(s3, {"fault": fault})).calls > 30
