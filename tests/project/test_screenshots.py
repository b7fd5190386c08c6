"""The pictures of the site: small, complete in themselves, and what the commands print now."""

import html
import os
import re
import runpy
import shutil
import subprocess
import sys

import pytest
from pages import is_shown
from places import ROOT, python_path

IMAGES = ROOT / "docs" / "images"
MOST_BYTES = 150_000
NUMBER = re.compile(r"\b\d\.\d+\b")


def text_of(picture):
    """The lines of a terminal in an SVG, without their ends."""
    places = re.findall(
        r'<text class="[^"]*-r\d+" x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]*)</text>',
        picture.read_text(),
    )
    lines = {}
    for _, line, words in sorted(places, key=lambda place: (float(place[1]), float(place[0]))):
        lines[line] = f"{lines.get(line, '')} {html.unescape(words)}"
    return "\n".join(line.replace("\xa0", " ").strip() for line in lines.values())


def test_pictures_are_small_and_fetch_nothing():
    found = {path.name: path.read_bytes() for path in IMAGES.iterdir()}
    assert {"ls.svg", "show.svg", "report-light.webp", "report-dark.webp"} <= found.keys()
    assert {name: len(data) for name, data in found.items() if len(data) > MOST_BYTES} == {}
    assert [
        name for name, data in found.items() if re.search(rb"(url\(|href=)[\"']?http", data)
    ] == []


def test_pictures_are_on_a_page():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    assert [path.name for path in IMAGES.iterdir() if f"images/{path.name}" not in text] == []


def test_badges_are_those_of_the_metadata():
    """License and Python versions of pyproject.toml; `python scripts/badges.py` draws them
    again.
    """
    script = runpy.run_path(str(ROOT / "scripts/badges.py"))
    drawn = {
        f"badge-{name}.svg": script["badge"](name, value)
        for name, value in script["badges"]().items()
    }
    assert {
        path.name: path.read_text(encoding="utf-8") for path in IMAGES.glob("badge-*.svg")
    } == drawn
    assert "3.10 | 3.11" in drawn["badge-python.svg"]
    assert (ROOT / "ft_ckpt/py.typed").exists()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium here")
def test_pictures_show_what_the_commands_print(tmp_path):
    command = [sys.executable, ROOT / "scripts/screenshots.py", tmp_path]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": python_path()}, check=True)
    for name, words in {"ls.svg": "ft-ckpt ls runs/sft", "show.svg": "model.norm.weight"}.items():
        shown, printed = (NUMBER.sub("N", text_of(folder / name)) for folder in (IMAGES, tmp_path))
        assert words in printed
        assert is_shown(shown, printed), f"{name} shows\n{shown}\n-- printed is\n{printed}"
    pictures = {(tmp_path / f"report-{scheme}.webp").read_bytes() for scheme in ("light", "dark")}
    assert len(pictures) == 2, "each scheme has its colours"
    assert all(picture[:4] == b"RIFF" and picture[8:12] == b"WEBP" for picture in pictures)
