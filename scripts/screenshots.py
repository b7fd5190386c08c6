"""Draws docs/images: `ft-ckpt ls`, `show` and the page of `report` of a run that is trained here.

python scripts/screenshots.py [FOLDER]

The page is photographed by Chromium; it takes about half a minute in all.
"""

import os
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from rich.console import Console
from rich.text import Text
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from ft_ckpt import CheckpointSaver, Keep

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
RUN = "runs/sft"  # below the working folder
SIZE = "1000,1290"  # of the picture of the page, in pixels
COLOUR_SCHEMES = {"dark": 0, "light": 1}  # as Blink numbers them
_WEB_FONT = re.compile(r"@font-face \{.*?\}", re.DOTALL)  # which a browser would fetch


def train() -> None:
    """Train 240 steps on rows that count in steps of 1, 2 or 3; the run overfits at its end."""
    set_seed(0)
    rows = (torch.randint(32, (96, 1)) + torch.randint(1, 4, (96, 1)) * torch.arange(12)) % 32
    rows[:64, 8:] = torch.randint(32, (64, 4))  # noise, which the model memorises
    samples = [{"input_ids": row, "labels": row} for row in rows[:64]]
    held_out = rows[64:, :8]
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=None,
        eos_token_id=None,
    )
    accelerator = Accelerator(cpu=True)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(samples, batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    keep = Keep(last=3, every_steps=80, best=("eval_loss", "min"))
    with CheckpointSaver(accelerator, RUN, every=20, keep=keep, background=True) as saver:
        saver.resume()
        for batch in saver.remaining(loader, epochs=30):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            metrics = {"loss": loss.item()}
            if (saver.progress.step + 1) % 20 == 0:
                with torch.no_grad():
                    metrics["eval_loss"] = model(input_ids=held_out, labels=held_out).loss.item()
            saver.step(metrics)
        saver.save(model, f"{RUN}/final")


def run_command(*words: str) -> str:
    """Run `ft-ckpt` with these arguments; return its output as on a terminal with colours."""
    terminal = {"FORCE_COLOR": "1", "TERM": "xterm-256color"}
    environment = {**os.environ, **terminal, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "ft_ckpt", *words]
    return subprocess.check_output(command, env=environment, text=True)


def draw_terminal(command: str, output: str) -> str:
    """Draw a terminal with a command and its output as SVG: dark, on light and on dark pages."""
    lines = [
        Text.assemble(("$ ", "bold green"), command),
        *Text.from_ansi(output.rstrip()).split("\n"),
    ]
    for line in lines:
        line.rstrip()
    width = max(line.cell_len for line in lines) + 1
    console = Console(record=True, width=width, file=StringIO(), color_system="truecolor")
    for line in lines:
        console.print(line, no_wrap=True)
    name = re.sub(r"\W+", "-", command)  # instead of a hash: the same names in each file
    return _WEB_FONT.sub("", console.export_svg(title=RUN, unique_id=name))


def photograph(page: Path, picture: Path, scheme: str) -> None:
    """Photograph the top of a page in Chromium, in a colour scheme."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
    flags += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    flags.append(f"--blink-settings=preferredColorScheme={COLOUR_SCHEMES[scheme]}")
    size = [f"--window-size={SIZE}", f"--screenshot={picture}"]
    command = ["chromium", *flags, *size, page.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)


def draw_all(folder: Path) -> None:
    """Train in the working folder, and draw all pictures into `folder`."""
    train()
    for name, words in {"ls": ["ls", RUN], "show": ["show", f"{RUN}/final"]}.items():
        picture = draw_terminal(f"ft-ckpt {' '.join(words)}", run_command(*words))
        (folder / f"{name}.svg").write_text(picture, encoding="utf-8")
    run_command("report", RUN, "-o", "report.html")
    for scheme in COLOUR_SCHEMES:
        photograph(Path("report.html").absolute(), folder / f"report-{scheme}.webp", scheme)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # for the command, too
    images = Path(sys.argv[1]).absolute() if sys.argv[1:] else IMAGES
    with TemporaryDirectory() as working:
        os.chdir(working)
        draw_all(images)
    for path in sorted(images.iterdir()):
        print(f"{path}: {path.stat().st_size:,} bytes")
