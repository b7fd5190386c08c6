"""Draws docs/images/badge-*.svg, the badges of README.md, from pyproject.toml.

python scripts/badges.py [FOLDER]
"""

import sys
from pathlib import Path
from xml.etree import ElementTree as Xml

import tomllib

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
FONT = "Verdana, 'DejaVu Sans', Geneva, sans-serif"
# pixels: a badge, a letter of 11 pixels, the space at the ends of a text
HEIGHT, LETTER, MARGIN = 20, 6.1, 7
NAME_COLOR, VALUE_COLOR = "#555d66", "#0a6cc4"


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES
    for name, value in badges().items():
        (folder / f"badge-{name}.svg").write_text(badge(name, value), encoding="utf-8")


def badges() -> dict[str, str]:
    """Return the value of each badge by its name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    prefix = "Programming Language :: Python :: 3."
    minors = []
    for line in project["classifiers"]:
        if line.startswith(prefix):
            minors.append(int(line.removeprefix(prefix)))
    python = " | ".join(f"3.{minor}" for minor in sorted(minors))
    return {"license": project["license"], "python": python, "typing": "mypy --strict"}


def badge(name: str, value: str) -> str:
    """Draw a badge as SVG: the name on grey, the value on blue."""
    name_width = round(2 * MARGIN + LETTER * len(name))
    value_width = round(2 * MARGIN + LETTER * len(value))
    width = str(name_width + value_width)
    size = {"width": width, "height": str(HEIGHT), "viewBox": f"0 0 {width} {HEIGHT}"}
    look = {"font-family": FONT, "role": "img"}
    svg = Xml.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", **size, **look})
    Xml.SubElement(svg, "title").text = f"{name}: {value}"
    clip = Xml.SubElement(svg, "clipPath", {"id": "round"})
    Xml.SubElement(clip, "rect", {"width": width, "height": str(HEIGHT), "rx": "3"})
    group = Xml.SubElement(svg, "g", {"clip-path": "url(#round)"})
    fields = ((name, 0, name_width, NAME_COLOR), (value, name_width, value_width, VALUE_COLOR))
    for _, x, field_width, color in fields:
        field = {"x": str(x), "width": str(field_width), "height": str(HEIGHT), "fill": color}
        Xml.SubElement(group, "rect", field)
    for words, x, field_width, _ in fields:
        place = {"x": f"{x + MARGIN}", "y": "14", "textLength": f"{field_width - 2 * MARGIN}"}
        Xml.SubElement(svg, "text", {**place, "fill": "#ffffff", "font-size": "11"}).text = words
    Xml.indent(svg)
    return Xml.tostring(svg, encoding="unicode") + "\n"


if __name__ == "__main__":
    main()
