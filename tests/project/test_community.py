"""The files for contributors and their programs: commands that exist, fields that agree with their
sources.
"""

import os
import re

import pytest
import tomllib
import yaml
from places import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = [
    path
    for path in sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
    if path.stem != "config"
]


def read(path):
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def test_the_hooks_are_the_static_checks_of_the_project():
    """A hook that does less than scripts/test gives commits that fail there; one that does more
    stops good ones.
    """
    entries = [
        hook["entry"].split()
        for repository in read(".pre-commit-config.yaml")["repos"]
        for hook in repository["hooks"]
    ]
    assert all(program.startswith(".venv/bin/") for program, *_ in entries)
    hooks = {" ".join([program.rpartition("/")[2], *words[:1]]) for program, *words in entries}
    checks = set(
        re.findall(
            r"\bstep (ruff \w+|mypy|lint-imports)",
            (ROOT / "scripts/test").read_text(encoding="utf-8"),
        )
    )
    assert hooks == checks


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_what_is_here(path):
    """And no more than they need: read access, named versions of actions, an end."""
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert "timeout-minutes" in job, name
        commands = [step["run"].split()[0] for step in job["steps"] if "run" in step]
        scripts = [command for command in commands if command.startswith("scripts/")]
        assert [script for script in scripts if not os.access(ROOT / script, os.X_OK)] == []
        assert [
            step["uses"]
            for step in job["steps"]
            if not re.search(r"@v?\w+$", step.get("uses", "@v0"))
        ] == []


def test_the_pythons_of_the_matrix_that_must_pass_are_those_of_a_default_run():
    job = read(".github/workflows/test.yml")["jobs"]["test"]
    page = (ROOT / "docs/compatibility.md").read_text(encoding="utf-8")
    tested = re.findall(r"^\| (3\.\d+)\.\d+ \|.*\| default \|", page, re.MULTILINE)
    assert {*tested} <= {*job["strategy"]["matrix"]["python"]}
    unlike = " && ".join(f"matrix.python != '{version}'" for version in tested)
    assert job["continue-on-error"] == f"${{{{ {unlike} }}}}"


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_forms_of_issues_have_what_their_host_requires(path):
    form = read(path)
    assert {"name", "description", "body"} <= form.keys()
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields)
    assert any(field.get("validations", {}).get("required") for field in fields)
    assert all(field["attributes"]["label"] for field in fields)


def test_one_sentence_says_what_it_is_everywhere():
    sentence = PROJECT["description"]
    assert read("CITATION.cff")["abstract"] == sentence
    assert " ".join((ROOT / "README.md").read_text(encoding="utf-8").split()).startswith(
        f"# ft_ckpt {sentence} "
    )


def test_the_citation_agrees_with_the_package():
    """It has no version of its own, which would be old after each release."""
    citation = read("CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert "version" not in citation
    assert citation["license"] == PROJECT["license"]
    assert [author["name"] for author in citation["authors"]] == [
        author["name"] for author in PROJECT["authors"]
    ]
    assert set(citation["keywords"]) <= set(PROJECT["keywords"])
    assert citation["title"].startswith(PROJECT["name"])
