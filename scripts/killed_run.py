"""Draws docs/images/killed-*.svg: the losses of a run that is killed, and of one that is not.

    python -m scripts.killed_run [FOLDER]    # about two minutes on a CPU; --kills, --epochs, --seed

A small Llama is trained twice from the same start. The second run is killed with SIGKILL at random
moments and started again after each. Every loss that it logs must be that of the first run, bit for
bit, and so must the final weights; otherwise the script ends with exit code 1 and draws nothing.
"""

import argparse
import hashlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree as Xml

from scripts.bench.chart import FONT, THEMES, write_text

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
LOG = "losses.jsonl"  # a line for each step that a process has made: its number, its loss as text
BATCHES = 32  # of an epoch
SAVE_EVERY = 10  # steps
KILLED = {"light": "#cf222e", "dark": "#ff7b72"}

# pixels: the picture, a curve, and the space around it
WIDTH, PANEL, TOP, GAP, FOOT = 640, 92, 34, 48, 40
LEFT, RIGHT = 40, 632  # pixels: the first and the last step


@dataclass(frozen=True)
class Life:
    """One process of a run."""

    losses: dict[int, str]  # of each step, exactly as it logged them
    killed: bool

    @property
    def first_step(self) -> int:
        return min(self.losses)

    @property
    def last_step(self) -> int:
        return max(self.losses)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.killed_run", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=IMAGES,
        help="of the pictures (default: docs/images)",
    )
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument(
        "--epochs", type=int, default=8, help=f"of {BATCHES} steps each (default: 8)"
    )
    parser.add_argument(
        "--seed", type=int, help="of the moments of the kills (default: another one each time)"
    )
    parser.add_argument(
        "--train", type=Path, metavar="RUN", help="be one process of a run, in this folder"
    )
    arguments = parser.parse_args()
    if arguments.train is not None:
        train(arguments.train, arguments.epochs)
        return
    chances = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory(prefix="killed-run-") as name:
        whole_run, killed_run = Path(name) / "whole", Path(name) / "killed"
        (whole,) = run(whole_run, arguments.epochs, kills=0, chances=chances)
        lives = run(killed_run, arguments.epochs, arguments.kills, chances)
        compare(whole, lives)
        compare_weights(whole_run, killed_run)
    write_pictures(arguments.folder, whole, lives)


# A run


def train(folder: Path, epochs: int) -> None:
    """Train the run in `folder`; the script is started in the same way after each kill."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from torch.utils.data import DataLoader
    from transformers import LlamaConfig, LlamaForCausalLM

    from ft_ckpt import CheckpointSaver

    set_seed(0)
    torch.set_num_threads(1)
    count = 8 * BATCHES
    first, difference = torch.randint(32, (count, 1)), torch.randint(1, 4, (count, 1))
    rows = (first + difference * torch.arange(16)) % 32
    rows[:, 10:] = torch.randint(32, (count, 6))  # noise, which keeps the losses moving
    samples = [{"input_ids": row, "labels": row} for row in rows]
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        attention_dropout=0.1,
        bos_token_id=None,
        eos_token_id=None,
    )
    accelerator = Accelerator(cpu=True)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(samples, batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    folder.mkdir(parents=True, exist_ok=True)
    with (
        CheckpointSaver(accelerator, folder, every=SAVE_EVERY, keep=2) as saver,
        (folder / LOG).open("a") as log,
    ):
        saver.resume()
        for batch in saver.remaining(loader, epochs=epochs):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            log.write(json.dumps([saver.progress.step + 1, loss.item().hex()]) + "\n")
            log.flush()
            saver.step({"loss": loss.item()})
        saver.save(model, folder / "final")


def run(
    folder: Path,
    epochs: int,
    kills: int,
    chances: random.Random,
    script: Sequence[str] = ("-m", "scripts.killed_run", "--train"),
) -> list[Life]:
    """Start the script, kill it `kills` times, let the last process finish; return all processes.

    `script`: the words before the folder and the epochs; it logs its steps as `train` does.
    """
    lives: list[Life] = []
    stretch = epochs * BATCHES / (kills + 1)  # each kill is in another part of the run
    for number in range(kills + 1):
        logged = len(read_log(folder))
        command = [sys.executable, *script, str(folder), "--epochs", str(epochs)]
        process = subprocess.Popen(command, cwd=ROOT)
        is_killed = number < kills
        if is_killed:
            step = int(stretch * (number + chances.uniform(0.3, 1)))
            kill(process, folder, logged, step, chances)
        code = process.wait()
        if code != (-signal.SIGKILL if is_killed else 0):
            sys.exit(f"process {number + 1} ended with exit code {code}")
        life = Life(dict(read_log(folder)[logged:]), is_killed)
        lives.append(life)
        print(f"process {number + 1}: steps {life.first_step} to {life.last_step}", flush=True)
    return lives


def kill(
    process: subprocess.Popen[bytes], folder: Path, logged: int, step: int, chances: random.Random
) -> None:
    """Kill the process at a random moment after it has logged this step.

    It may be in a step or in a save then. `logged`: lines that are those of earlier processes.
    """
    while process.poll() is None:
        steps = [number for number, _ in read_log(folder)[logged:]]
        if steps and steps[-1] >= step:
            time.sleep(chances.uniform(0, 0.1))
            process.send_signal(signal.SIGKILL)
            return
        time.sleep(0.005)


def read_log(folder: Path) -> list[tuple[int, str]]:
    """Return step and loss of each complete line that the processes of a run have logged."""
    path = folder / LOG
    if not path.exists():
        return []
    *lines, _ = path.read_text(encoding="ascii").split("\n")
    pairs = [json.loads(line) for line in lines]
    return [(step, loss) for step, loss in pairs]


# The proof


def compare(whole: Life, lives: list[Life]) -> None:
    """Compare every loss with that of the run that was not killed, bit for bit.

    Ends the program for a difference, and for a missing step.
    """
    for number, life in enumerate(lives, start=1):
        for step, loss in life.losses.items():
            if loss != whole.losses.get(step):
                sys.exit(
                    f"step {step}: process {number} of the killed run has loss {loss}, not "
                    f"{whole.losses.get(step)}"
                )
    steps: list[int] = []
    for life in lives:
        steps += life.losses
    missing = set(whole.losses) - set(steps)
    if missing:
        sys.exit(f"the killed run has not made the steps {sorted(missing)}")
    repeated = len(steps) - len(whole.losses)
    kills = sum(life.killed for life in lives)
    print(
        f"{len(whole.losses)} steps, killed {kills} times, {repeated} steps made twice: all losses "
        "equal, bit for bit"
    )


def compare_weights(*folders: Path) -> None:
    """Compare the final weights of the runs byte for byte. Ends the program for a difference."""
    files = [folder / "final" / "model.safetensors" for folder in folders]
    digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    if len(set(digests)) > 1:
        sys.exit(f"the final weights differ: {digests}")
    print(f"final weights equal: SHA-256 {digests[0]}")


# The pictures


def write_pictures(folder: Path, whole: Life, lives: list[Life]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for theme in THEMES:
        (folder / f"killed-{theme}.svg").write_text(picture(whole, lives, theme), encoding="utf-8")


def picture(whole: Life, lives: list[Life], theme: str) -> str:
    """Draw both curves below each other as SVG, with the moments of the kills."""
    text, muted, ours, _, outline = THEMES[theme]
    height = TOP + 2 * PANEL + GAP + FOOT
    size = {"width": str(WIDTH), "height": str(height), "viewBox": f"0 0 {WIDTH} {height}"}
    look = {"font-family": FONT, "role": "img"}
    svg = Xml.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", **size, **look})
    kills = [life.last_step for life in lives if life.killed]
    title = (
        f"The losses of two runs of {whole.last_step} steps: one was killed {len(kills)} "
        "times, and they are equal"
    )
    Xml.SubElement(svg, "title").text = title
    tops = (TOP, TOP + PANEL + GAP)
    words = (
        "nobody killed this run",
        f"this one was killed {len(kills)} times with SIGKILL, and started again",
    )
    axis = Axis(whole)
    for top, name in zip(tops, words, strict=True):
        write_text(svg, LEFT, top - 14, name, text, 16, weight="600")
        draw_frame(svg, axis, top, outline, muted)
    draw_curve(svg, axis, tops[0], whole.losses, ours)
    for killed, restarted in pairwise(lives):
        draw_kill(svg, axis, tops[1], killed.last_step, restarted.first_step, KILLED[theme])
    for life in lives:
        draw_curve(svg, axis, tops[1], life.losses, ours)
    equal = f"{whole.last_step} losses and the final weights are equal, bit for bit"
    write_text(svg, LEFT, height - 8, equal, text, 15)
    write_text(svg, RIGHT, height - 8, "shaded: steps made twice", muted, 14, anchor="end")
    write_text(svg, RIGHT, TOP - 14, "loss by step", muted, 14, anchor="end")
    Xml.indent(svg)
    return Xml.tostring(svg, encoding="unicode") + "\n"


class Axis:
    """Where steps and losses are in a picture."""

    def __init__(self, whole: Life) -> None:
        values = [float.fromhex(loss) for loss in whole.losses.values()]
        self.last_step = whole.last_step
        self.lowest, self.highest = min(values), max(values)

    def x(self, step: int) -> float:
        return LEFT + (RIGHT - LEFT) * step / self.last_step

    def y(self, loss: float, top: float) -> float:
        return top + PANEL * (self.highest - loss) / (self.highest - self.lowest)


def draw_frame(svg: Xml.Element, axis: Axis, top: float, outline: str, muted: str) -> None:
    """Draw the line below a curve, and write the highest and the lowest loss."""
    bottom = f"{top + PANEL + 4:g}"
    line = {"x1": str(LEFT), "x2": str(RIGHT), "y1": bottom, "y2": bottom}
    Xml.SubElement(svg, "line", {**line, "stroke": outline, "stroke-width": "1"})
    write_text(svg, LEFT - 8, top + 8, f"{axis.highest:.1f}", muted, 13, anchor="end")
    write_text(svg, LEFT - 8, top + PANEL + 4, f"{axis.lowest:.1f}", muted, 13, anchor="end")


def draw_curve(
    svg: Xml.Element, axis: Axis, top: float, losses: dict[int, str], color: str
) -> None:
    points = []
    for step, loss in losses.items():
        points.append(f"{axis.x(step):.1f},{axis.y(float.fromhex(loss), top):.1f}")
    look = {"fill": "none", "stroke": color, "stroke-width": "1.5", "stroke-linejoin": "round"}
    Xml.SubElement(svg, "polyline", {"points": " ".join(points), **look})


def draw_kill(
    svg: Xml.Element, axis: Axis, top: float, step: int, restarted: int, color: str
) -> None:
    """Draw a dashed line through the curve, and a cross above it.

    The steps that the next process repeats are shaded.
    """
    x = f"{axis.x(step):.1f}"
    place = {"x": f"{axis.x(restarted):.1f}", "y": f"{top:g}", "height": f"{PANEL + 4:g}"}
    width = f"{max(0.0, axis.x(step) - axis.x(restarted)):.1f}"
    Xml.SubElement(svg, "rect", {**place, "width": width, "fill": color, "fill-opacity": "0.15"})
    line = {"x1": x, "x2": x, "y1": f"{top:g}", "y2": f"{top + PANEL + 4:g}"}
    look = {"stroke": color, "stroke-width": "1.5", "stroke-dasharray": "4 3"}
    Xml.SubElement(svg, "line", {**line, **look})
    write_text(svg, axis.x(step), top + 2, "✕", color, 15, anchor="middle", weight="600")


if __name__ == "__main__":
    main()
