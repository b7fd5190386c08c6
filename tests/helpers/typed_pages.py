"""The Python blocks of pages and the cells of notebooks as modules, and their type errors.

Each script of a page is a module, and so is each block that is a file of its own. The first line of
a module binds the names that its page assumes, with the types in `page_names.py`. mypy has its
settings from pyproject.toml, pyright its standard ones.
"""

import builtins
import dis
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from symtable import symtable
from types import CodeType
from typing import Any

from pages import Block, blocks_of, cells_of, scripts_of
from places import ROOT

HELPERS = ROOT / "tests" / "helpers"
_NAMES = HELPERS / "page_names.py"
_IDENTIFIERS = symtable(_NAMES.read_text(encoding="utf-8"), _NAMES.name, "exec").get_identifiers()
ASSUMABLE = frozenset(_IDENTIFIERS) - set(dir(builtins))


@dataclass(frozen=True)
class Module:
    """A script of a page: its lines, and the place of each in the document."""

    name: str
    lines: tuple[str, ...]
    places: tuple[str, ...]


def modules_of(page: Path) -> list[Module]:
    """Make a module of each script of a page or notebook."""
    blocks = cells_of(page) if page.suffix == ".ipynb" else blocks_of(page)
    scripts = scripts_of(block for block in blocks if block.language == "python")
    stem = re.sub(r"\W", "_", f"{page.parent.name}_{page.stem}")
    modules = []
    for number, script in scripts.items():
        unnamed = [block for block in script if block.title is None]
        modules.append(_make_module(f"{stem}_{number}", page, unnamed))
        files = {Path(block.title).stem: block for block in script if block.title is not None}
        modules += [_make_module(f"{stem}_{name}", page, [block]) for name, block in files.items()]
    return modules


def complaints_about(
    modules: Mapping[Path, Sequence[Module]], folder: Path
) -> dict[Path, list[str]]:
    """Return the errors of both type checkers by page.

    The modules are written into `folder`, and each checker is run once over all of them.
    """
    places: dict[str, tuple[Path, Module]] = {}
    for page, of_page in modules.items():
        for module in of_page:
            file = folder / f"{module.name}.py"
            file.write_text("\n".join(module.lines) + "\n", encoding="utf-8")
            places[file.name] = (page, module)
    complaints: dict[Path, list[str]] = {page: [] for page in modules}
    for checker, run in {"mypy": _run_mypy, "pyright": _run_pyright}.items():
        for file_name, line, message in run(folder):
            page, module = places[file_name]
            place, first_line = module.places[line - 1], message.splitlines()[0]
            complaints[page].append(f"{place}: {checker}: {first_line}")
    return complaints


def _make_module(name: str, page: Path, blocks: Iterable[Block]) -> Module:
    document = page.relative_to(ROOT).as_posix() if page.is_relative_to(ROOT) else page.name
    lines = [""]
    places = [f"{document}, the names that it assumes"]
    for block in blocks:
        prefix = f"{block.page}, line " if page.suffix == ".ipynb" else f"{document}:"
        for number, line in enumerate(block.code.splitlines(), block.line):
            lines.append(line)
            places.append(f"{prefix}{number}")
    assumed = sorted(_assumed_names("\n".join(lines)) & ASSUMABLE)
    if assumed:
        bindings = [f"{name} = page_names.{name}" for name in assumed]
        lines[0] = "; ".join(["import page_names", *bindings])
    return Module(name, tuple(lines), tuple(places))


def _assumed_names(code: str) -> set[str]:
    """Return the names that a script reads before it binds them."""
    module = compile(code, "<page>", "exec")
    bound: set[str] = set()
    assumed: set[str] = set()
    for instruction in dis.get_instructions(module):
        if instruction.opname == "STORE_NAME":
            bound.add(instruction.argval)
        elif instruction.opname == "LOAD_NAME" and instruction.argval not in bound:
            assumed.add(instruction.argval)
    return assumed | (_globals_of_functions(module) - bound)


def _globals_of_functions(code: CodeType) -> set[str]:
    """Return the global names that the functions defined in `code` read."""
    names: set[str] = set()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            for instruction in dis.get_instructions(constant):
                if instruction.opname == "LOAD_GLOBAL":
                    names.add(instruction.argval)
            names |= _globals_of_functions(constant)
    return names


def _run_mypy(folder: Path) -> list[tuple[str, int, str]]:
    files = [str(path) for path in sorted(folder.glob("*.py"))]
    command = [sys.executable, "-m", "mypy", "--output=json", "--hide-error-context", *files]
    output = _run(command, os.environ | {"MYPYPATH": str(folder)})
    errors = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return [(Path(error["file"]).name, error["line"], error["message"]) for error in errors]


def _run_pyright(folder: Path) -> list[tuple[str, int, str]]:
    settings = {
        "typeCheckingMode": "standard",
        "pythonVersion": "3.10",
        "extraPaths": [str(ROOT), str(HELPERS)],
        "reportMissingImports": False,  # libraries of pages that run in environments of their own
        # torch does not mark the names that its own documents import
        "reportPrivateImportUsage": False,
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    options = ["--project", str(folder), "--pythonpath", sys.executable, "--outputjson"]
    output = _run([sys.executable, "-m", "basedpyright", *options], os.environ)
    errors = []
    for diagnostic in json.loads(output)["generalDiagnostics"]:
        if diagnostic["severity"] == "error":
            line = diagnostic["range"]["start"]["line"] + 1
            errors.append((Path(diagnostic["file"]).name, line, diagnostic["message"]))
    return errors


def _run(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Run a type checker; return its output. It ends with 1 where it finds errors."""
    options: dict[str, Any] = {"cwd": ROOT, "capture_output": True, "text": True}
    result = subprocess.run(command, env=environment, check=False, **options)
    assert result.returncode in (0, 1), result.stdout + result.stderr
    return str(result.stdout)
