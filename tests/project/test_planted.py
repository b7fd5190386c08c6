"""The faults of tests/planted still fit the code; `scripts/planted` tries them."""

import ast
from collections import Counter

import pytest
from places import ROOT

from scripts.planted import FOLDER, Fault, StaleFaultError, failed_tests, read_faults

FAULTS = read_faults()


def test_each_fault_fits_its_file_which_compiles_with_it():
    problems = []
    for fault in FAULTS:
        try:
            ast.parse(fault.changed_text(ROOT))
        except (StaleFaultError, OSError, SyntaxError) as error:
            problems.append(f"{fault.id}: {error}")
        if fault.old.strip() == fault.new.strip():
            problems.append(f"{fault.id}: changes nothing")
    assert problems == []


def test_faults_have_different_ids_and_name_tests_that_exist():
    assert [
        name for name, count in Counter(fault.id for fault in FAULTS).items() if count > 1
    ] == []
    paths = {argument.partition("::")[0] for fault in FAULTS for argument in fault.tests}
    assert [
        path for path in sorted(paths) if path.startswith("tests/") and not (ROOT / path).exists()
    ] == []
    assert {path.suffix for path in FOLDER.iterdir()} == {".toml"}


def test_a_fault_whose_text_has_changed_is_refused_and_leaves_the_file(tmp_path):
    (tmp_path / "module.py").write_text("a = 1\nb = 1\n")
    fault = Fault("twice", "room", "nothing", "module.py", " = 1", " = 2", ())
    with pytest.raises(
        StaleFaultError, match=r"twice: its text is 2 times in module\.py, expected once"
    ):
        fault.changed_text(tmp_path)
    single = Fault("once", "room", "nothing", "module.py", "b = 1", "b = 2", ())
    with single.planted(tmp_path):
        assert (tmp_path / "module.py").read_text() == "a = 1\nb = 2\n"
    assert (tmp_path / "module.py").read_text() == "a = 1\nb = 1\n"


def test_the_tests_that_failed_are_those_of_the_summary():
    summary = (
        "FAILED tests/a.py::test_b[x - y] - AssertionError: 1\nERROR "
        "tests/a.py::test_c\nFAILED to start\n"
    )
    assert failed_tests(summary) == ("tests/a.py::test_b[x", "tests/a.py::test_c")
