"""The documents say what is so: settings, commands and the README's own lines."""

import os
import re
import runpy
import shlex
import subprocess
import sys
from dataclasses import fields

import pytest
import torch
from faults import save_of, save_with_state
from places import HELPERS, ROOT
from test_house import blocks, commands

import ft_ckpt
from ft_ckpt.cli import app

README = ROOT / "README.md"
ELSEWHERE = {"global_step100/"}  # made by other libraries; reading it is tested with DeepSpeed

# What the README's lines take for granted, and how often the model was called.
GIVEN = """
import atexit, sys, warnings
sys.path.insert(0, HELPERS)
warnings.simplefilter("ignore")
import torch, models, trainers
from accelerate.utils import set_seed
set_seed(0)
model, tokenizer = models.llama(), models.tokenizer()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
data = trainers.Sentences(noise=False)
loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
SFTTrainer = trainers.Trainer
args = trainers.TrainingArguments("runs/trainer", max_steps=4, save_steps=2, **trainers.SILENT)
calls = []
model.register_forward_pre_hook(lambda *_: calls.append(1) if model.training else None)
atexit.register(lambda: print("batches:", len(calls)))
"""


def test_every_setting_is_listed_with_its_default():
    """A setting that is new, gone or changed makes the page untrue: `python scripts/settings.py` writes it again."""
    script = runpy.run_path(str(ROOT / "scripts" / "settings.py"))
    page = script["PAGE"].read_text(encoding="utf-8")
    assert page == script["page"]()
    named = re.findall(r"^\| `(\w+)` \| `(.+?)` \|", page, re.MULTILINE)
    expected = [field for kind in (ft_ckpt.SaverConfig, ft_ckpt.Every) for field in fields(kind)]
    assert [(name, eval(default)) for name, default in named] == [(field.name, field.default) for field in expected]


def block_with(words):
    """The one Python block of the README that has these words."""
    (found,) = [block for block in blocks(README, "python") if words in block]
    return found


def run_as_printed(folder, *parts):
    """The number of batches that the README's lines trained on, in a process of their own."""
    told = {"PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    code = "".join((f"HELPERS = {str(HELPERS)!r}\n", GIVEN, *parts))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=os.environ | told, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return int(re.search(r"batches: (\d+)", done.stdout)[1]), done.stderr


def test_the_twenty_lines_as_printed(tmp_path):
    """On a first start and on a second; then the checkpoint is found and loaded, in the lines printed below them."""
    lines, after = block_with("saver.remaining(loader, epochs=3)"), block_with("newest = ft_ckpt.latest")
    logged = "import logging\nlogging.basicConfig(level=logging.INFO)\n"
    first, told = run_as_printed(tmp_path, logged, lines, after)
    assert first == 21  # three epochs of seven
    assert "INFO:ft_ckpt:a fresh start: nothing was resumed from runs/sft" in told
    assert re.search(r"INFO:ft_ckpt:saved final: [\d.]+ KB in [\d.]+ s", told)
    second, _ = run_as_printed(tmp_path, lines, after)
    assert second == 0  # the run is finished
    assert ft_ckpt.verify(tmp_path / "runs/sft/final").ok


def test_the_trainer_lines_as_printed(tmp_path):
    lines = block_with("FtCkptCallback()]")
    starts = [run_as_printed(tmp_path, lines) for _ in range(2)]
    assert [batches for batches, _ in starts] == [4, 0]
    assert {path.name for path in tmp_path.glob("runs/trainer/checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}
    assert ft_ckpt.verify(tmp_path / "runs/final").ok


@pytest.fixture
def made(tmp_path, monkeypatch):
    """The files that the README's commands name."""
    for step in (500, 1000):
        save_with_state(tmp_path / f"runs/sft/checkpoint-{step}", step, metrics={"eval_loss": 1 / step})
    save_of(tmp_path / "runs/sft/final", step=None)
    ft_ckpt.save({"weight": torch.ones(2)}, tmp_path / "model.h5")
    monkeypatch.chdir(tmp_path)


def test_the_commands_as_printed(made):
    """Every `ft-ckpt` line of the README, one after the other; exit code 1 is the answer "they differ"."""
    lines = [line for block in blocks(README, "sh") for line in commands(block) if line.startswith("ft-ckpt ")]
    assert len(lines) > 10
    for line in lines:
        words = shlex.split(line, comments=True)[1:]
        if not ELSEWHERE & set(words):
            try:
                code = app(words, standalone_mode=False)
            except SystemExit as end:
                code = end.code
            assert (line, code or 0) == (line, 1 if words[0] == "diff" else 0)
