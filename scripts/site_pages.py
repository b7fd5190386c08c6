"""Pages of the site that are no files of docs/: for each notebook, and for language models.

mkdocs calls the functions `on_...` (mkdocs.yml). For language models there are `llms.txt`, the list
of the pages, and the source of each page, in the form of https://llmstxt.org. The link to the API
leads to a page of the site, because the source of that page has names in place of docstrings.
"""

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

API = "api.md"
NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
_COLOURS = re.compile(r"\x1b\[[\d;]*m")


def on_files(files: Any, config: Any) -> Any:
    """Add the notebooks, a page for each, and their pictures."""
    from mkdocs.structure.files import File

    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        folder = NOTEBOOKS.name
        files.append(File.generated(config, f"{folder}/{path.name}", abs_src_path=str(path)))
        page = f"{folder}/{path.stem}.md"
        files.append(File.generated(config, page, content=notebook_text(path)))
        for number, picture in enumerate(pictures_of(path)):
            name = f"{folder}/{path.stem}-{number}.png"
            files.append(File.generated(config, name, content=picture))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Point links to a notebook at its page."""
    return re.sub(r"\]\(\.\./notebooks/(\w+)\.ipynb\)", r"](notebooks/\1.md)", markdown)


def on_post_build(config: Any) -> None:
    docs, site = Path(config["docs_dir"]), Path(config["site_dir"])
    (site / "llms.txt").write_text(list_pages(config, docs), encoding="utf-8")
    for _, _, page in pages_of(config["nav"]):
        if page != API:
            text = text_of(docs, page).replace(f"]({API}", "](api/")
            (site / page).write_text(text, encoding="utf-8")


def list_pages(config: Any, docs: Path) -> str:
    """Return the text of llms.txt: a section for each group of the navigation, a line a page."""
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}"]
    group = None
    for section, title, page in pages_of(config["nav"]):
        if section != group:
            lines += ["", f"## {section}", ""]
            group = section
        link = page if page != API else page.replace(".md", "/")
        lines.append(f"- [{title}]({link}): {first_sentence(text_of(docs, page))}")
    return "\n".join(lines) + "\n"


def pages_of(nav: list[Any], section: str = "Begin") -> Iterator[tuple[str, str, str]]:
    """Yield group, title and file of each page.

    Pages of a group come before those of the groups in it.
    """
    groups = []
    for entry in nav:
        for title, target in entry.items():
            if isinstance(target, str):
                yield section, title, target
            else:
                groups.append((title, target))
    for title, entries in groups:
        yield from pages_of(entries, title)


def first_sentence(page: str) -> str:
    """Return the first sentence of a page's text, without the marks of Markdown."""
    not_text = ("#", "```", "|", "<", "-")
    paragraphs = [" ".join(block.split()) for block in page.split("\n\n")]
    text = next(block for block in paragraphs if block and not block.startswith(not_text))
    without_links = re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", text)
    plain = re.sub(r"^\*\*\w+\.\*\* |\*\*", "", without_links)
    return re.split(r"(?<=[.:])\s", plain, maxsplit=1)[0].rstrip(":")


def text_of(docs: Path, page: str) -> str:
    """Read the source of a page of the navigation."""
    folder, _, name = page.rpartition("/")
    if folder == NOTEBOOKS.name:
        return notebook_text(NOTEBOOKS / name.replace(".md", ".ipynb"))
    return on_page_markdown((docs / page).read_text(encoding="utf-8"))


def notebook_text(path: Path) -> str:
    """Return a notebook as Markdown: its texts, its code, and the stored outputs of its cells."""
    parts: list[str] = []
    pictures = 0
    for cell in _cells(path):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source.replace("](../docs/", "](../").replace(".ipynb)", ".md)"))
            if len(parts) == 1:
                parts.append(f"[The notebook]({path.name}) itself, to be run in a checkout.")
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            if "image/png" in output.get("data", ()):
                parts.append(f"![Output of the cell above]({path.stem}-{pictures}.png)")
                pictures += 1
            elif output["output_type"] == "stream":
                parts.append(f"```text\n{_COLOURS.sub('', ''.join(output['text'])).rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def pictures_of(path: Path) -> list[bytes]:
    """Return the PNG files among the outputs of a notebook, in order."""
    pictures = []
    for cell in _cells(path):
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                pictures.append(base64.b64decode("".join(data["image/png"])))
    return pictures


def _cells(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text(encoding="utf-8"))["cells"])
