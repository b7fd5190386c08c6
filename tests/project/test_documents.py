"""The documents say what is so: every code block of README and docs is run, and answers what the
page shows.
"""

import json
import os
import re
import runpy
import subprocess
import sys
from dataclasses import fields
from html.parser import HTMLParser
from urllib.parse import unquote, urljoin, urlsplit

import pytest
import tomllib
import yaml
from launch import run_cases
from pages import PARSED, RUN, blocks_of
from places import ROOT
from test_house import ERRORS, cli_commands

import ft_ckpt

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
PARSERS = {"yaml": yaml.safe_load, "json": json.loads, "toml": tomllib.loads}
MOST_NOT_RUN = 9
PAGES_SECONDS = 900  # for all pages: some start programs, and wait for signals

QUICK = ("settings", "on-disk")
pages = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
quick_pages = pytest.mark.parametrize(
    "page",
    [page if page.stem in QUICK else pytest.param(page, marks=pytest.mark.slow) for page in PAGES],
    ids=[page.stem for page in PAGES],
)


@pytest.fixture(scope="module")
def done(request, tmp_path_factory):
    """The folder where the pages asked for were done, and what went wrong on each: one process has
    the libraries.
    """
    folder = tmp_path_factory.mktemp("pages")
    tests = [item for item in request.session.items if "done" in getattr(item, "fixturenames", ())]
    asked = {item.callspec.params.get("page") for item in tests if hasattr(item, "callspec")}
    names = [name_of(page) for page in PAGES if page in asked]
    for name, page in {"loop": loop_lines(), "trainer": trainer_lines()}.items():
        if any(item.name.startswith(f"test_the_{name}_lines") for item in tests):
            (folder / name).mkdir()
            (folder / name / "page.md").write_text(page, encoding="utf-8")
            names.append(name)
    return folder, run_cases("page", names, folder, ranks=1, timeout=PAGES_SECONDS)


@pytest.mark.timeout(PAGES_SECONDS + 60)
@quick_pages
def test_a_page_does_what_it_says(page, done):
    """Its blocks in order, in an empty folder: what a reader would do who copies them one after the
    other.
    """
    check(done, name_of(page))


@pages
def test_what_is_not_run_is_of_a_known_kind_or_has_a_reason(page):
    blocks = blocks_of(page)
    assert [str(block) for block in blocks if block.language not in RUN | PARSED | {"text"}] == []
    assert [
        str(block) for block in blocks if block.not_run is not None and len(block.not_run) < 20
    ] == []
    for block in blocks:
        if block.language in PARSED:
            PARSERS[block.language](block.code)


def test_few_blocks_are_not_run():
    assert (
        len([block for page in PAGES for block in blocks_of(page) if block.not_run]) <= MOST_NOT_RUN
    )


def test_the_loop_lines_do_nothing_once_they_are_done(done):
    """On a first start three epochs of seven batches, and a log; on a second nothing."""
    runs = check(done, "loop") / "runs/sft"
    assert {"checkpoint-21", "final"} <= {path.name for path in runs.iterdir()}
    assert ft_ckpt.verify(runs / "final").ok


def test_the_trainer_lines_do_nothing_once_they_are_done(done):
    runs = check(done, "trainer") / "runs"
    assert {path.name for path in runs.glob("trainer/checkpoint-*")} == {
        "checkpoint-2",
        "checkpoint-4",
    }
    assert ft_ckpt.verify(runs / "final").ok


def test_every_setting_is_listed_with_its_default():
    """A setting that is new, gone or changed makes the page untrue: `python scripts/settings.py`
    writes it again.
    """
    script = runpy.run_path(str(ROOT / "scripts" / "settings.py"))
    page = script["PAGE"].read_text(encoding="utf-8")
    assert page == script["page"]()
    named = re.findall(r"^\| `(\w+)` \| `(.+?)` \|", page, re.MULTILINE)
    expected = [field for kind in (ft_ckpt.SaverConfig, ft_ckpt.Every) for field in fields(kind)]
    assert [(name, eval(default)) for name, default in named] == [
        (field.name, field.default) for field in expected
    ]


def test_nothing_public_is_left_out():
    """Every public name is on the page of the API, every command on its page, every error in its
    table.
    """
    api, cli, errors = (
        (ROOT / f"docs/{name}.md").read_text(encoding="utf-8") for name in ("api", "cli", "errors")
    )
    described = set(re.findall(r"^::: ft_ckpt\.(\w+)", api, re.MULTILINE))
    assert {name for name in ft_ckpt.__all__ if name not in described} == set()
    assert {
        name for name in cli_commands() if not re.search(rf"^\| .*`{name}\b", cli, re.MULTILINE)
    } == set()
    assert ERRORS - {"CheckpointError"} == set(re.findall(r"^\| `(\w+)`", errors, re.MULTILINE))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built without a warning: mkdocs has found every name of the API reference."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_every_link_of_the_site_leads_to_a_page_and_a_heading(site):
    """Links, pictures, styles and scripts of all pages, as a browser resolves them on a server."""
    pages = {path.relative_to(site).as_posix(): Page(path) for path in site.rglob("*.html")}
    assert {"api/index.html", "index.html", "notebooks/adapter_to_hub/index.html"} <= pages.keys()
    links = [(page, link) for page, found in pages.items() for link in found.links]
    assert len(links) > 2000
    assert [
        (page, link) for page, link in links if not leads_somewhere(site, pages, page, link)
    ] == []


@pytest.mark.slow
def test_every_link_between_the_sources_beside_the_site_leads_to_one(site):
    """Those that language models follow, from llms.txt on."""
    texts = {
        path: path.read_text(encoding="utf-8") for path in [site / "llms.txt", *site.rglob("*.md")]
    }
    plain = {
        path: re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
        for path, text in texts.items()
    }
    links = [
        (path, link) for path, text in plain.items() for link in re.findall(r"\]\(([^)#\s]+)", text)
    ]
    assert len(links) > 150
    local = [(path, link) for path, link in links if "://" not in link]
    assert [(path.name, link) for path, link in local if not (path.parent / link).exists()] == []


def test_descriptions_of_parameters_become_rows():
    """In the order of the docstring, each to the next one or the end of its paragraph; other names
    stay in the text.
    """
    split = runpy.run_path(str(ROOT / "scripts" / "api_tables.py"))["split_descriptions"]
    docstring = """Load it.

    `path` is a folder. `base`: the model, or
    its folder. It is compared. `with_report`: see `base`.

    `other`: no parameter. Raises LoadError."""
    text, rows = split(docstring.replace("    ", ""), ["path", "base", "with_report"])
    assert text == "Load it.\n\n`path` is a folder.\n\n`other`: no parameter. Raises LoadError."
    assert rows == {
        "base": "the model, or its folder. It is compared.",
        "with_report": "see `base`.",
    }


def test_every_page_is_listed_for_language_models():
    """Once, with the first sentence of its text."""
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = runpy.run_path(str(ROOT / "scripts" / "site_pages.py"))["list_pages"](
        config, ROOT / "docs"
    )
    lines = re.findall(r"^- \[[^]]+\]\(([^)]+)\): (.+)$", listed, re.MULTILINE)
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    pages += [f"notebooks/{path.stem}.md" for path in (ROOT / "notebooks").glob("*.ipynb")]
    assert sorted(link.replace("api/", "api.md") for link, _ in lines) == sorted(pages)
    assert [
        link for link, sentence in lines if not 20 < len(sentence) < 300 or "](" in sentence
    ] == []


# How links are followed


class Page(HTMLParser):
    """The links and the anchors of a page of the site."""

    def __init__(self, path):
        super().__init__()
        self.links, self.anchors = [], {""}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        named = dict(attributes)
        self.anchors |= {named[name] for name in ("id", "name") if named.get(name)}
        self.links += [named[name] for name in ("href", "src") if named.get(name)]


def leads_somewhere(site, pages, page, link):
    """Whether a link on a page leads to a file of the site and, in a page, to an anchor, or
    elsewhere.
    """
    target = urlsplit(urljoin(f"http://here/{page}", link))
    if target.netloc != "here":
        return True
    path = unquote(target.path).lstrip("/")
    path = f"{path}index.html" if path == "" or path.endswith("/") else path
    if target.fragment and path in pages:
        return unquote(target.fragment) in pages[path].anchors
    # the fragment of an image tells the theme by what light to show it
    return (site / path).is_file()


# How a page is done


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def check(done, name):
    """The folder in which a page was done; the test fails with what went wrong there."""
    folder, errors = done
    if errors[name]:
        pytest.fail(errors[name][-6000:], pytrace=False)
    return folder / name


def loop_lines():
    """A page of the README's loop, started twice, which says each time whether it has trained."""
    lines = block_with("saver.remaining(loader, epochs=3)")
    logged = (
        "import logging, sys\nlogging.basicConfig(level=logging.INFO, stream=sys.stdout, "
        "format='%(message)s')\n"
    )
    code = f"{logged}{lines}print('trained:', 'loss' in globals())\n"
    begun = (
        "a fresh start: nothing was resumed from runs/sft\n...\nsaved final: 7 KB in 7 "
        "s\ntrained: True\n"
    )
    return script(code, begun) + script(code, "...\ntrained: False\n")


def trainer_lines():
    """The same of the lines for a Trainer."""
    code = block_with("checkpointed(SFTTrainer)") + "print(len(calls), 'batches')\n"
    return script(code, "...\n4 batches\n") + script(code, "...\n0 batches\n")


def block_with(words):
    """The one Python block of the README that has these words."""
    (found,) = [
        block for block in blocks_of(README) if block.language == "python" and words in block.code
    ]
    return found.code


def script(code, answer):
    """A part of a page: a block that begins anew, and what it prints."""
    return f"<!-- new script -->\n```python\n{code}```\n\n```text\n{answer}```\n"
