"""Import strings in the package, which no tool for imports sees, name objects that exist."""

import ast
import re

import pytest
from places import ROOT

from ft_ckpt.extension_points import load_extension

IMPORT_STRING = re.compile(r"ft_ckpt(\.\w+)+:\w+(\.\w+)*")
RESOLVERS = {"import_module", "resolve_name"}
# of other modules than those of ft_ckpt's tables: a class of diffusers, plugins of h5py and
# callbacks of Lightning, and the module of a command
OTHER_IMPORTS = {
    "cli/__init__.py",
    "extension_points.py",
    "extensions/hdf5/hdf5_datasets.py",
    "integrations/lightning.py",
    "model/empty/diffusers.py",
}


def modules():
    package = ROOT / "ft_ckpt"
    for path in sorted(package.rglob("*.py")):
        yield path.relative_to(package).as_posix(), ast.parse(path.read_text())


def import_strings():
    for _, tree in modules():
        for node in ast.walk(tree):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
            if is_text and IMPORT_STRING.fullmatch(node.value):
                yield node.value


STRINGS = sorted(set(import_strings()))


def test_they_are_seen():
    assert "ft_ckpt.extensions.deepspeed.zero:DeepSpeedWrapper" in STRINGS
    assert "ft_ckpt.extensions.hdf5.formats:Hdf5" in STRINGS


@pytest.mark.parametrize("import_string", STRINGS)
def test_each_names_an_object(import_string):
    assert callable(load_extension(import_string))


def test_one_function_resolves_them():
    users = set()
    for name, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and RESOLVERS & {a.name for a in node.names}:
                users.add(name)
            if isinstance(node, ast.Import) and {"importlib", "pkgutil"} & {
                alias.name for alias in node.names
            }:
                users.add(name)
    assert users == OTHER_IMPORTS
