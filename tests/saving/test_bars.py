"""Bars of saves, loads and resumes: in a terminal, of work that lasts, cleared at the end; one line
of a resume.
"""

import io
import logging
import subprocess
import sys
import textwrap

import pytest
from terminal import screen_after, shown_in_terminal

from ft_ckpt import CheckpointSaver, messages

RUN = """
    import sys, time, torch, ft_ckpt
    from ft_ckpt.saving import stage
    from ft_ckpt.storage.io import direct_io, prefetch
    from ft_ckpt import progress_bars
    progress_bars.MIN_SECONDS = {wait}
    stage.BLOCK_BYTES = 1 << 16

    def slow(call):
        def wait_and_call(*args):
            time.sleep(0.01)
            return call(*args)
        return wait_and_call

    direct_io.LocalWriting.write = slow(direct_io.LocalWriting.write)
    prefetch._read_block = slow(prefetch._read_block)
    model = torch.nn.Linear(1024, 4096)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    saver = ft_ckpt.CheckpointSaver(None, "run", background={background})
    saver.resume(model=model, optimizer=optimizer)
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    saver.step()
    {before}
    saver.save_state()
    saver.wait()
    {after}
    saver.close()
    again = ft_ckpt.CheckpointSaver(None, "run")
    again.resume(model=model, optimizer=optimizer)
    ft_ckpt.load_model("run/checkpoint-1", into=model)
    print("done")
    """


def script(wait=0.0, before="", after="", background=False):
    return RUN.format(wait=wait, before=before, after=after, background=background)


def test_bars_in_a_terminal_are_cleared_and_give_the_line_back(tmp_path):
    """A Trainer shows its steps in a bar of tqdm: the bar of a save takes its line, and gives it
    back.
    """
    before = "from tqdm import tqdm; bar = tqdm(total=10); bar.update(3); bar.refresh()"
    output = shown_in_terminal(script(before=before, after="bar.close()"), tmp_path)
    for label in ("saving checkpoint-1", "resuming checkpoint-1", "loading checkpoint-1"):
        assert label in output
    screen = screen_after(output)
    assert [
        line for line in screen if line.startswith(("saving", "resuming", "loading", "comparing"))
    ] == []
    assert len([line for line in screen if "3/10" in line]) == 1
    assert screen[-1] == "done"


@pytest.mark.slow
def test_short_work_has_no_bar(tmp_path):
    output = shown_in_terminal(script(wait=60), tmp_path)
    assert "saving checkpoint-1" not in output
    assert "\x1b" not in output


@pytest.mark.slow
def test_a_background_save_has_no_bar(tmp_path):
    assert "saving checkpoint-1" not in shown_in_terminal(script(background=True), tmp_path)


@pytest.mark.slow
def test_without_a_terminal_there_are_only_lines(tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent(script()))
    ended = subprocess.run(
        [sys.executable, "script.py"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        timeout=120,
    )
    assert ended.stdout == "done\n"
    told = [line for line in ended.stderr.splitlines() if "resume" in line]
    assert told[0] == "a fresh start: nothing was resumed from run"
    assert told[1].startswith("resumed checkpoint-1 at step 1, epoch 0, batch 0, saved ")
    assert told[1].endswith(" s ago")
    assert len(told) == 2


LOGGING = {
    "at INFO": (["handler"], logging.INFO, logging.NOTSET, "logged"),
    "at WARNING": (["handler"], logging.WARNING, logging.NOTSET, ""),
    "silenced": ([], logging.WARNING, logging.WARNING, ""),
    "nothing configured": ([], logging.WARNING, logging.NOTSET, "written"),
}


@pytest.mark.parametrize("mode", ["auto", "never"])
@pytest.mark.parametrize("how", LOGGING)
def test_a_start_is_one_line_however_logging_is_configured(
    tmp_path, monkeypatch, capsys, how, mode
):
    """A fresh start that was asked for is told to the log alone."""
    names, root_level, own_level, expected = LOGGING[how]
    stream = io.StringIO()
    monkeypatch.setattr(logging.root, "handlers", [logging.StreamHandler(stream) for _ in names])
    monkeypatch.setattr(logging.root, "level", root_level)
    monkeypatch.setattr(messages.LOG, "level", own_level)
    messages.LOG.manager._clear_cache()  # of the levels
    monkeypatch.chdir(tmp_path)
    CheckpointSaver(None, "run").resume(mode)
    monkeypatch.undo()
    messages.LOG.manager._clear_cache()
    line = "a fresh start: nothing was resumed from run\n"
    assert stream.getvalue() == (line if expected == "logged" else "")
    assert capsys.readouterr().err == (line if (expected, mode) == ("written", "auto") else "")
