"""The house rules, as tests: what a reader of this repository may rely on without looking."""

import ast
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from pages import blocks_of, commands_of
from places import ROOT

import ft_ckpt
from ft_ckpt import errors

PACKAGE = sorted((ROOT / "ft_ckpt").rglob("*.py"))
PAGES = [
    *sorted(ROOT.glob("*.md")),
    ROOT / "ft_ckpt/README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
ERRORS = {
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, Exception)
}
FOREIGN_ERRORS = {
    "__init__.py": {"ImportError"},  # of the import on Windows
    "cli/options.py": {"ArgumentTypeError"},  # argparse's error for the type of an argument
    "runs/saves/run_saves.py": {"SystemExit"},  # after the save that a signal asked for
    # it ends the iterator of an upload, whose client aborts it then
    "extensions/buckets/uploads.py": {"InterruptedError"},
    # it stands for system calls and fails as they do
    "storage/local_disk.py": {"OSError", "FileNotFoundError"},
    # likewise; `explained` makes it one of ours before it leaves the module
    "storage/io/direct_io.py": {"OSError"},
    # the same function makes it one of ours
    "extensions/rl/engines/client.py": {"IncompleteRead", "TimeoutError"},
    "storage/libc.py": {"OSError"},  # it stands for system calls
    # it names the field; the caller, which knows the file, converts it
    "schema.py": {"FieldError"},
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


# Names and rooms


def test_every_package_says_what_lives_there_what_must_not_and_where_to_begin():
    packages = [
        path for path in PACKAGE if path.name == "__init__.py" and path.parent.name != "ft_ckpt"
    ]
    said = {
        str(path.relative_to(ROOT)): " ".join((ast.get_docstring(parse(path)) or "").split())
        for path in packages
    }
    assert [
        name
        for name, doc in said.items()
        if "ft_ckpt/cli" not in name and "Nothing here" not in doc
    ] == []
    assert [name for name, doc in said.items() if "Begin at" not in doc] == []


# The public face


def test_public_names_are_pinned_sorted_and_resolve():
    assert ft_ckpt.__all__ == [
        "CheckpointInfo",
        "CheckpointSaver",
        "CopyReport",
        "Every",
        "Frontier",
        "Keep",
        "LoadReport",
        "PendingPublish",
        "PendingPush",
        "PendingSave",
        "Place",
        "Progress",
        "PublishReport",
        "PullReport",
        "PushReport",
        "RestoreReport",
        "SaveReport",
        "SaverConfig",
        "ServerOptions",
        "SyncReport",
        "Writer",
        "average",
        "best",
        "check_for",
        "checkpoint_closure",
        "convert",
        "copy",
        "errors",
        "export",
        "follow",
        "latest",
        "load",
        "load_model",
        "merge",
        "open_place",
        "publish",
        "pull",
        "push",
        "save",
        "sign",
        "sync",
        "verify",
    ]
    assert ft_ckpt.__all__ == sorted(ft_ckpt.__all__)
    assert [name for name in ft_ckpt.__all__ if getattr(ft_ckpt, name, None) is None] == []


@pytest.mark.parametrize(
    "module",
    [
        "ft_ckpt",
        "ft_ckpt.checkpoint.catalog.catalog",
        "ft_ckpt.checkpoint.commit.commit",
        "ft_ckpt.cli",
    ],
)
def test_importing_brings_no_torch(module):
    heavy = {"torch", "transformers", "peft", "accelerate", "numpy"}
    code = f"import sys, {module}; print(*sorted({heavy} & set(sys.modules)))"
    assert run(sys.executable, "-c", code).strip() == ""


@pytest.mark.slow
def test_a_run_without_adapters_brings_no_peft(tmp_path):
    """It takes seconds to import, in every process of a run."""
    code = f"""
        import sys, torch
        from ft_ckpt import CheckpointSaver
        model = torch.nn.Linear(2, 2)
        with CheckpointSaver(directory={str(tmp_path)!r}) as saver:
            saver.register(model=model)
            saver.resume()
            saver.save_state(path={str(tmp_path / "run")!r})
            saver.save(model, {str(tmp_path / "out")!r})
        print("peft" in sys.modules)
        """
    assert run(sys.executable, "-c", textwrap.dedent(code)).startswith("False")


def test_every_error_is_a_checkpoint_error_and_a_builtin_one():
    builtins = (ValueError, AttributeError, TypeError, OSError, RuntimeError)
    children = [getattr(errors, name) for name in ERRORS - {"CheckpointError"}]
    assert [
        e
        for e in children
        if not (issubclass(e, errors.CheckpointError) and issubclass(e, builtins))
    ] == []


# The code


def test_what_is_raised_comes_from_our_own_tree():
    foreign = []
    trees = {path: parse(path) for path in PACKAGE}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    makers = {node.name for node in nodes if isinstance(node, FUNCTIONS) and returns_error(node)}
    for path, tree in trees.items():
        name = str(path.relative_to(ROOT / "ft_ckpt"))
        kinds = {
            node.name for node in tree.body if isinstance(node, ast.ClassDef) and is_error(node)
        }
        kinds.add("kind")  # a variable that is one of our classes
        allowed = {"AssertionError"} | ERRORS | makers | kinds | FOREIGN_ERRORS.get(name, set())
        foreign += [
            f"{name}:{line}: {error}" for line, error in raised(tree) if error not in allowed
        ]
    assert foreign == []


def test_no_tensor_is_made_on_the_default_device_of_a_script():
    """`torch.set_default_device` is the script's: host memory that files are written from is on the
    CPU.
    """
    kinds = (
        "empty",
        "zeros",
        "ones",
        "full",
        "tensor",
        "as_tensor",
        "arange",
        "eye",
        "rand",
        "randn",
        "randint",
    )
    makers = {f"torch.{kind}" for kind in kinds}
    calls = [
        (path.name, node)
        for path in (ROOT / "ft_ckpt").rglob("*.py")
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in makers
    ]
    assert calls
    assert [
        f"{name}:{call.lineno}"
        for name, call in calls
        if "device" not in {each.arg for each in call.keywords}
    ] == []


def test_text_leaves_the_package_in_one_place():
    """Lines, warnings and log records are printable: see `ft_ckpt.messages`."""
    allowed = {
        "print": "cli/options.py",
        **dict.fromkeys(("logging.getLogger", "sys.stderr.write", "warnings.warn"), "messages.py"),
    }
    named = {f"{path.relative_to(ROOT / 'ft_ckpt')}": parse(path) for path in PACKAGE}
    calls = [
        (name, node)
        for name, tree in named.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    ]
    ways = "print|.*(stdout|stderr).write|warnings.warn.*|logging.[a-z].*|traceback.print.*"
    found = [(name, node.lineno, ast.unparse(node.func)) for name, node in calls]
    assert [
        each for each in found if re.fullmatch(ways, each[2]) and allowed.get(each[2]) != each[0]
    ] == []


# The pages


def test_python_on_a_page_compiles():
    blocks = [block for page in PAGES for block in blocks_of(page) if block.language == "python"]
    assert blocks
    for block in blocks:
        compile(block.code, str(block), "exec")


def test_commands_on_a_page_exist():
    blocks = [block for page in PAGES for block in blocks_of(page) if block.language == "sh"]
    lines = [line for block in blocks for line in commands_of(block.code)]
    assert [line for line in lines if not is_runnable(line)] == []


def test_paths_named_on_a_page_exist():
    named = re.compile(r"(?<![\w./-])((?:ft_ckpt|scripts|configs|tests)/[\w./-]*\w)")
    paths = [(page.name, path) for page in PAGES for path in named.findall(page.read_text())]
    assert [(page, path) for page, path in paths if not (ROOT / path).exists()] == []


def test_the_house_plan_names_rooms_that_are_there():
    plan = (ROOT / "ft_ckpt/README.md").read_text()
    rooms = set(re.findall(r"`([a-z_]+(?:/[a-z_0-9]+)*(?:/|\.py))`", plan))
    assert [
        room
        for room in sorted(rooms)
        if not (ROOT / "ft_ckpt" / room).exists() and not (ROOT / room).exists()
    ] == []
    # not folders that are left of older versions, with compiled files alone
    modules = {path.relative_to(ROOT / "ft_ckpt").parts[0] for path in PACKAGE}
    public = {name for name in modules if not name.startswith("_")}
    named = {room.split("/")[0] for room in rooms}
    assert public - named == set()


def test_links_on_a_page_lead_somewhere():
    targets = [
        (page, target)
        for page in PAGES
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text())
    ]
    assert [
        target
        for page, target in targets
        if "://" not in target and not (page.parent / target).exists()
    ] == []


def test_changelog_begins_with_this_version():
    """A version in development (.dev0) is unreleased there, and a released one has a date."""
    version, state = re.search(
        r"^## (\S+) - (.+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    ).groups()
    assert version == ft_ckpt.__version__.removesuffix(".dev0")
    assert re.fullmatch(
        r"unreleased" if ".dev" in ft_ckpt.__version__ else r"\d{4}-\d\d-\d\d", state
    )


# The scripts and the command


def test_what_conftest_spreads_over_the_workers_is_there(request):
    conftest = request.config.pluginmanager.getplugin(str(ROOT / "tests/conftest.py"))
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    tests = {
        node.name for path in files for node in parse(path).body if isinstance(node, FUNCTIONS)
    }
    assert sorted(conftest.CAMPAIGNS - tests) == []
    assert sorted({*conftest.LONGEST_FILES} - {path.stem for path in files}) == []


def test_scripts_can_be_run_or_say_what_they_are():
    files = [
        path
        for path in (ROOT / "scripts").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    assert [str(path) for path in files if not (is_program(path) or is_documented(path))] == []


@pytest.mark.parametrize(
    "script",
    [
        "scripts/environment",
        "scripts/test",
        "scripts/planted",
        "scripts/demo",
        "scripts/network_disk",
        "scripts/release",
        ".ci/run",
    ],
)
def test_shell_scripts_parse(script):
    assert os.access(ROOT / script, os.X_OK)
    assert run("bash", "-n", script) == ""


def test_every_command_has_help(capsys):
    from ft_ckpt.cli import run_command

    for command in ([], *([name] for name in cli_commands())):
        with pytest.raises(SystemExit, match="0"):
            run_command([*command, "--help"])
        assert " ".join(["usage: ft-ckpt", *command]) in capsys.readouterr().out


@pytest.mark.skipif(
    not (ROOT / ".git").exists(), reason="only git knows which files belong to the project"
)
def test_no_text_depends_on_one_machine():
    """An absolute path of a developer's machine works nowhere else."""
    machine = re.compile(r"(?<![\w./])/(?:work|home|root|Users)/\w+")
    found = [f"{path}: {match[0]}" for path in tracked() for match in machine.finditer(text(path))]
    assert found == []


# How to look


def run(*command: str) -> str:
    """What a command prints; the test fails with what it complained about when it fails."""
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def returns_error(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function makes one of our errors, or hands back the system's own where ours does
    not apply.
    """
    return function.returns is not None and ast.unparse(function.returns).split(".")[-1] in {
        *ERRORS,
        "OSError",
    }


def is_error(kind: ast.ClassDef) -> bool:
    """Whether a class is a kind of one of our errors, told apart in its own module only."""
    return kind.name.startswith("_") and any(ast.unparse(base) in ERRORS for base in kind.bases)


def raised(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of what each `raise` makes; passing on an error that exists already makes
    nothing.
    """
    protocol = {
        id(n)
        for f in ast.walk(tree)
        if getattr(f, "name", "") == "__getattr__"
        for n in ast.walk(f)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None and id(node) not in protocol:
            made = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            for choice in (made.body, made.orelse) if isinstance(made, ast.IfExp) else (made,):
                name = ast.unparse(choice).split(".")[-1]
                if isinstance(node.exc, ast.Call) or name[0].isupper():
                    yield node.lineno, name


def is_runnable(line: str) -> bool:
    """Whether a command is ours and there, or a program of the readers; `ft-ckpt` must know the
    subcommand.
    """
    name, *rest = shlex.split(line, comments=True)
    if name == "ft-ckpt":
        return rest[0].startswith("--") or rest[0] in cli_commands()
    if "/" in name:
        return os.access(ROOT / name, os.X_OK)
    return name in {
        "accelerate",
        "export",
        "h5repack",
        "hf",
        "mv",
        "pip",
        "printf",
        "python",
        "srun",
        "swift",
        "timeout",
        "torchrun",
    }


def cli_commands() -> list[str]:
    from ft_ckpt.cli import COMMANDS

    return sorted(COMMANDS)


def is_program(path: Path) -> bool:
    return os.access(path, os.X_OK) and path.read_bytes().startswith(b"#!/usr/bin/env ")


def is_documented(path: Path) -> bool:
    return path.suffix == ".md" or (
        path.suffix == ".py" and ast.get_docstring(parse(path)) is not None
    )


def tracked() -> list[Path]:
    """The files of a checkout that git does not ignore."""
    # A checkout that belongs to another user (a container's volume) is as good as ours for listing
    # files.
    listed = run("git", "-c", "safe.directory=*", "ls-files", "-co", "--exclude-standard")
    return [path for path in map(ROOT.joinpath, listed.splitlines()) if path.is_file()]


def text(path: Path) -> str:
    """A file as text; bytes that are no text become question marks."""
    return path.read_bytes().decode("utf-8", errors="replace")
