"""The part of the metadata that depends on where the project is published; everything else is in
pyproject.toml.

README.md links to files of the repository. A package index shows its text without them. With
FT_CKPT_PROJECT_URL, the address of the repository (https://host/owner/name), these links and
pictures become addresses there, and the project's URLs are stated. Without it, links become their
text and pictures go.
"""

import os
import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
URL = "FT_CKPT_PROJECT_URL"
SHIPPED = "\nPages that this text names are in the source distribution, in the folder `docs`.\n"
_FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_PICTURE = re.compile(r'(?<=srcset=")(?!https?:)[^"]+|(?<=src=")(?!https?:)[^"]+')
_SHOWN = re.compile(r"!\[([^\]]*)\]\((?!https?:)([^)\s]+)\)")
_LINK = re.compile(r"(?<!!)\[((?:!\[[^\]]*\]\([^)]*\)|[^\]])*)\]\((?!https?:|#)([^)\s]+)\)")
_HTML = re.compile(r"<picture>.*?</picture>\n*", re.DOTALL)


def long_description(readme: str, version: str, url: str = "") -> str:
    """The text of README.md for a package index; code blocks stay as they are."""
    parts = _FENCE.split(readme)
    blocks = _FENCE.findall(readme)
    address = url.rstrip("/")
    texts = [
        with_addresses(part, version, address) if address else without_links(part) for part in parts
    ]
    joined = texts[0]
    for block, text in zip(blocks, texts[1:], strict=True):
        joined += block + text
    return joined if address else joined + SHIPPED


def with_addresses(text: str, version: str, address: str) -> str:
    """Links lead to the pages of the version's tag, pictures to its raw files."""
    pages, files = f"{address}/blob/v{version}", f"{address}/raw/v{version}"
    text = _PICTURE.sub(rf"{files}/\g<0>", text)
    text = _SHOWN.sub(rf"![\1]({files}/\2)", text)
    return _LINK.sub(rf"[\1]({pages}/\2)", text)


def without_links(text: str) -> str:
    text = _HTML.sub("", text)
    text = _SHOWN.sub(r"\1", text)
    return _LINK.sub(r"\1", text)


def project_urls(version: str, url: str = "") -> dict[str, str]:
    """The addresses that a package index lists; none without an address."""
    if not url:
        return {}
    address = url.rstrip("/")
    return {
        "Repository": address,
        "Documentation": f"{address}/blob/v{version}/docs/index.md",
        "Changelog": f"{address}/blob/v{version}/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }


def stated_version() -> str:
    (version,) = re.findall(
        r'^__version__ = "(.+)"', (ROOT / "ft_ckpt" / "_version.py").read_text(), re.MULTILINE
    )
    return version


if __name__ == "__main__":
    setup(
        long_description=long_description(
            (ROOT / "README.md").read_text(encoding="utf-8"),
            stated_version(),
            os.environ.get(URL, ""),
        ),
        long_description_content_type="text/markdown",
        project_urls=project_urls(stated_version(), os.environ.get(URL, "")),
    )
