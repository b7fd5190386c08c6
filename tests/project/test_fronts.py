"""Fronts: other packages enter a package by the names of its front."""

import ast
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STUBS = sorted((ROOT / "ft_ckpt").glob("*/**/__init__.pyi"))
# Modules that others still enter as modules; the list only gets shorter.
ENTERED = {
    "ft_ckpt.storage.local_disk",
}


def package_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).parent.parts)


@pytest.mark.parametrize("stub", STUBS, ids=package_of)
def test_each_name_of_a_front_is_in_the_module_that_it_names(stub):
    package = package_of(stub)
    front = importlib.import_module(package)
    listed = ast.parse(stub.read_text()).body
    assert all(isinstance(node, ast.ImportFrom) and node.level == 1 for node in listed)
    for node in listed:
        module = importlib.import_module(f"{package}.{node.module}")
        for alias in node.names:
            assert alias.asname == alias.name
            assert getattr(front, alias.name) is getattr(module, alias.name)


@pytest.mark.parametrize("stub", STUBS, ids=package_of)
def test_no_name_of_a_front_is_that_of_a_module(stub):
    """An imported submodule becomes an attribute of its package, in place of the name."""
    names = {alias.name for node in ast.parse(stub.read_text()).body for alias in node.names}
    modules = {path.stem for path in stub.parent.glob("*.py")}
    modules |= {path.parent.name for path in stub.parent.glob("*/__init__.py")}
    assert names & modules == set()


def entered_modules() -> set[str]:
    """Modules of packages with a front that a module outside of the package imports."""
    fronts = {package_of(stub): stub.parent for stub in STUBS}
    entered = set()
    for path in (ROOT / "ft_ckpt").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            imported = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for name in imported:
                package, _, module = name.rpartition(".")
                folder = fronts.get(package)
                if folder is None or folder in path.parents:
                    continue
                if (folder / f"{module}.py").exists():
                    entered.add(name)
    return entered


def test_packages_are_entered_by_their_fronts():
    assert entered_modules() == ENTERED


def import_strings():
    """The import strings in the sources, "module:name", by which a layer names a higher one."""
    names = set()
    for path in (ROOT / "ft_ckpt").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.update(re.findall(r"^ft_ckpt(?:\.\w+)*:[\w.]+$", node.value))
    return sorted(names)


@pytest.mark.parametrize("name", import_strings())
def test_import_strings_name_what_exists(name):
    assert callable(pkgutil.resolve_name(name))
