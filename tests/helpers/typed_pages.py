"""The Python blocks of pages and the cells of notebooks as modules, and what mypy and pyright
answer to them.

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

from pages import Block, blocks_of, cells_of, scripts_of
from places import ROOT

HELPERS = ROOT / "tests" / "helpers"
_NAMES = HELPERS / "page_names.py"
_IDENTIFIERS = symtable(_NAMES.read_text(encoding="utf-8"), _NAMES.name, "exec").get_identifiers()
GIVEN = frozenset(_IDENTIFIERS) - set(dir(builtins))


@dataclass(frozen=True)
class Module:
    """A script of a page: its code by line, and for each line its place in the document."""

    name: str
    lines: tuple[str, ...]
    places: tuple[str, ...]


def modules_of(page: Path) -> list[Module]:
    """The scripts of a page or notebook as modules."""
    blocks = cells_of(page) if page.suffix == ".ipynb" else blocks_of(page)
    scripts = scripts_of(block for block in blocks if block.language == "python")
    stem = re.sub(r"\W", "_", f"{page.parent.name}_{page.stem}")
    modules = []
    for number, script in scripts.items():
        told = [block for block in script if block.title is None]
        modules.append(_make_module(f"{stem}_{number}", page, told))
        files = {Path(block.title).stem: block for block in script if block.title is not None}
        modules += [_make_module(f"{stem}_{name}", page, [block]) for name, block in files.items()]
    return modules


def complaints_about(
    modules: Mapping[Path, Sequence[Module]], folder: Path
) -> dict[Path, list[str]]:
    """The errors of both type checkers by page; each checker is run once over all `modules`, which
    go into `folder`.
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
            complaints[page].append(
                f"{module.places[line - 1]}: {checker}: {message.splitlines()[0]}"
            )
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
    assumed = sorted(_assumed_names("\n".join(lines)) & GIVEN)
    if assumed:
        lines[0] = "; ".join(
            ["import page_names", *(f"{name} = page_names.{name}" for name in assumed)]
        )
    return Module(name, tuple(lines), tuple(places))


def _assumed_names(code: str) -> set[str]:
    """The names that a script reads before it binds them."""
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
    """The global names that the functions defined in `code` read."""
    names: set[str] = set()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            loaded = (instruction for instruction in dis.get_instructions(constant))
            names |= {
                instruction.argval for instruction in loaded if instruction.opname == "LOAD_GLOBAL"
            }
            names |= _globals_of_functions(constant)
    return names


def _run_mypy(folder: Path) -> list[tuple[str, int, str]]:
    files = [str(path) for path in sorted(folder.glob("*.py"))]
    command = [sys.executable, "-m", "mypy", "--output=json", "--hide-error-context", *files]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"MYPYPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    errors = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
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
    command = [
        sys.executable,
        "-m",
        "basedpyright",
        "--project",
        str(folder),
        "--pythonpath",
        sys.executable,
    ]
    done = subprocess.run(
        [*command, "--outputjson"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    errors = [
        each
        for each in json.loads(done.stdout)["generalDiagnostics"]
        if each["severity"] == "error"
    ]
    return [
        (Path(error["file"]).name, error["range"]["start"]["line"] + 1, error["message"])
        for error in errors
    ]
