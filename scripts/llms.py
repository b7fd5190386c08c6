"""What the site has for language models: `llms.txt`, the list of its pages, and the source of each page beside it.

mkdocs calls `on_post_build` after each build (mkdocs.yml). The form is that of https://llmstxt.org. The link to the API
leads to a page of the site, because the source of that page has names in place of docstrings.
"""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

API = "api.md"


def on_post_build(config: Any) -> None:
    docs, site = Path(config["docs_dir"]), Path(config["site_dir"])
    (site / "llms.txt").write_text(list_pages(config, docs), encoding="utf-8")
    for _, _, page in pages_of(config["nav"]):
        if page != API:
            shutil.copyfile(docs / page, site / page)


def list_pages(config: Any, docs: Path) -> str:
    """The text of llms.txt: a section for each group of the navigation, a line for each page."""
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}"]
    group = None
    for section, title, page in pages_of(config["nav"]):
        if section != group:
            lines += ["", f"## {section}", ""]
            group = section
        link = page if page != API else page.replace(".md", "/")
        lines.append(f"- [{title}]({link}): {first_sentence((docs / page).read_text(encoding='utf-8'))}")
    return "\n".join(lines) + "\n"


def pages_of(nav: list[Any], section: str = "Begin") -> Iterator[tuple[str, str, str]]:
    """Group, title and file of each page; pages of a group come before those of the groups in it."""
    items = [item for entry in nav for item in entry.items()]
    yield from ((section, title, page) for title, page in items if isinstance(page, str))
    for title, pages in items:
        if not isinstance(pages, str):
            yield from pages_of(pages, title)


def first_sentence(page: str) -> str:
    """The first sentence of a page's text, without the marks of Markdown."""
    paragraphs = (" ".join(each.split()) for each in page.split("\n\n"))
    text = next(each for each in paragraphs if each and not each.startswith(("#", "```", "|", "<", "-")))
    plain = re.sub(r"^\*\*\w+\.\*\* |\*\*", "", re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", text))
    return re.split(r"(?<=[.:])\s", plain, maxsplit=1)[0].rstrip(":")
