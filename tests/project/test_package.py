"""The package as its users install it: extras, versions, distributions; each table of a page equals
its source.
"""

import re
import subprocess
import sys

import pytest
import tomllib
from places import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
PIN = re.compile(r"^([\w.-]+)==(\S+)", re.MULTILINE)
NAME = re.compile(r"[\w.-]+")


def test_every_extra_is_on_the_page_with_its_packages():
    table = {cells[0]: cells[1] for cells in rows("docs/install.md", "extra")}
    expected = {
        extra: [name for each in needed for name in named(each)] for extra, needed in EXTRAS.items()
    }
    assert {
        extra: re.findall(r"`([^`]+)`", packages) for extra, packages in table.items()
    } == expected


def test_the_import_on_windows_names_the_page():
    """Otherwise the first use fails with "No module named 'fcntl'"."""
    code = "import sys; sys.platform = 'win32'; import ft_ckpt"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ImportError: ft_ckpt: Windows lacks" in done.stderr
    assert "docs/platforms.md" in done.stderr


def test_extras_that_are_named_exist():
    """In an error or on a page: pip only warns of an extra that it does not know."""
    files = [*(ROOT / "ft_ckpt").rglob("*.py"), ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    installed = re.compile(
        r"""(?:\.whl|['"]\.)\[([\w,]+)\]['"`)]|(?:install_hint\(['"]|the extra \[?`)(\w+)['"`]"""
    )
    found = {
        (file.name, extra)
        for file in files
        for listed, named in installed.findall(text(file))
        for extra in (listed or named).split(",")
    }
    assert {("locations.py", "remote"), ("install.md", "remote")} <= found
    assert [(file, extra) for file, extra in sorted(found) if extra not in EXTRAS] == []


def test_no_text_installs_a_name_of_the_package_index():
    """`pip install ft_ckpt` would bring whatever somebody has put there."""
    files = [*(ROOT / "ft_ckpt").rglob("*.py"), ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    installs = re.compile(r"pip install [^\n`#]*?\bft_ckpt(?!-)")
    assert [(file.name, words) for file in files for words in installs.findall(text(file))] == []


@pytest.mark.parametrize("page", ["docs/promises.md", "docs/security.md"])
def test_the_tests_of_each_promise_exist(page):
    """At least one for each row of the page's tables."""
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text(ROOT / page))
    assert len(named) > 35
    tests = {
        file: set(re.findall(r"^ *def (test_\w+)", text(ROOT / file), re.MULTILINE))
        for file, _ in named
    }
    assert [f"{file}::{name}" for file, name in named if name not in tests[file]] == []
    assert [promise for promise, cells in rows(page, "what") if "::" not in cells] == []


def test_the_table_of_versions_is_that_of_what_is_required_and_tested():
    oldest, newest = (
        dict(re.findall(PIN, text(ROOT / name)))
        for name in ("constraints-oldest.txt", "constraints.txt")
    )
    users = [extra for extra in EXTRAS if extra not in {"bench", "dev", "docs", "test"}]
    run = sorted(pythons_of_runs(), key=by_number)
    expected = {"Python": [PROJECT["requires-python"].removeprefix(">="), run[0], run[-1]]}
    for requirement in [
        *PROJECT["dependencies"],
        *(each for extra in users for each in EXTRAS[extra]),
    ]:
        name, lowest = re.match(r"([\w.-]+)>=([\d.]+)", requirement).groups()
        expected[name] = [lowest, oldest.get(name, "-"), newest.get(name, "-")]
    assert {name: cells for name, *cells in rows("docs/compatibility.md", "library")} == expected


def test_the_oldest_tested_versions_are_the_oldest_accepted_ones():
    """But torch, as constraints-oldest.txt says; of others a patch release may be newer."""
    for name, accepted, oldest, _ in rows("docs/compatibility.md", "library"):
        assert (
            oldest == "-"
            or name in {"Python", "torch"}
            or (oldest + ".").startswith(accepted + ".")
        ), name


def test_the_classifiers_name_the_pythons_of_the_runs():
    classified = set(re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"])))
    assert classified == pythons_of_runs()


def test_checkpoints_of_every_release_are_read_by_tests():
    """Every dated version of the changelog is on the page, and has golden checkpoints."""
    released = re.findall(r"^## (\S+) - \d", text(ROOT / "CHANGELOG.md"), re.MULTILINE)
    goldens = {path.name for path in (ROOT / "tests/golden/checkpoints").iterdir()}
    assert (
        {version for version, _ in rows("docs/compatibility.md", "written by")}
        == set(released)
        == goldens
    )


def pythons_of_runs():
    """The versions of Python, such as 3.11, in the page's table of runs."""
    return {
        ".".join(version.split(".")[:2])
        for version, *_ in rows("docs/compatibility.md", "run on Python")
    }


def by_number(version):
    return [int(step) for step in version.split(".")]


def rows(page, first):
    """The rows of the tables of a page whose first heading is `first`, as cells; code marks of the
    first cell go.
    """
    tables = re.findall(
        rf"^\| {first} \|.*\n\|[-|]+\n((?:\|.*\n)+)", text(ROOT / page), re.MULTILINE
    )
    assert tables, f"{page} has no table of {first}"
    for line in "".join(tables).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        yield [cells[0].strip("`"), *cells[1:]]


def named(requirement):
    """The packages of a requirement; those of an extra of ours are the extra's names."""
    ours = re.fullmatch(r"ft_ckpt\[([\w,]+)\]", requirement)
    return ours[1].split(",") if ours else [NAME.match(requirement)[0]]


def text(path):
    return path.read_text(encoding="utf-8")
