"""The list of commands, suggestions for wrong names, and warnings of libraries."""

import subprocess
import sys

import pytest
from commands import ft_ckpt

from ft_ckpt.cli import COMMANDS, GROUPS, run_command
from ft_ckpt.errors import ConfigError

WARNING = """
import sys, warnings
from ft_ckpt import cli
from ft_ckpt.messages import warn
def run_command(words):
    for _ in range(2):
        for name, category in {categories}:
            text = f"{{category.__name__}} about \\x1b[2J"
            warnings.warn_explicit(text, category, name, 1, registry={{}})
    warn("runs/a: left out")
cli.run_command = run_command
cli.main()
"""
TRANSFORMERS = "/usr/lib/python3/site-packages/transformers/models/auto.py"
SINGLE = "/usr/lib/python3/dist-packages/six.py"


def test_the_help_fits_a_small_terminal():
    lines = ft_ckpt("--help").out.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 32


def test_the_help_lists_each_command_in_its_group():
    lines = ft_ckpt().out.splitlines()[2 : 2 + len(COMMANDS)]
    listed: dict[str, list[str]] = {}
    for line in lines:
        group, name = line[:8].strip(), line[9:].split()[0]
        if group:
            listed[group] = []
        listed[list(listed)[-1]].append(name)
    assert listed == {group: list(commands) for group, commands in GROUPS.items()}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lss"], "lss: no such command; did you mean ls? `ft-ckpt --help` lists the commands"),
        (
            ["verfy", "x"],
            "verfy: no such command; did you mean verify? `ft-ckpt --help` lists the commands",
        ),
        (["list", "x"], "list: no such command; use `ft-ckpt ls`"),
        (["zzz"], "zzz: no such command; `ft-ckpt --help` lists the commands"),
        (
            ["."],
            (
                ".: no such command; `ft-ckpt ls .` lists the checkpoints in a folder, `ft-ckpt "
                "show .` describes"
            ),
        ),
        (["--verison"], "--verison: no such option; did you mean --version? See `ft-ckpt --help`"),
        (
            ["ls", "x", "--metric"],
            "ls: --metric: no such option; did you mean --metrics? See `ft-ckpt ls --help`",
        ),
        (
            ["convert", "a", "b", "--formt=h5"],
            "convert: --formt: no such option; did you mean --format? See",
        ),
        (
            ["export", "a", "b", "--for", "vlm"],
            "export: --for: vlm: expected one of vllm, sglang; did you mean vllm?",
        ),
        (
            ["publish", "a", "http://b", "--check", "lsted"],
            "publish: --check: lsted: expected one of all, listed; did",
        ),
        (
            ["check-for", "sglan", "a"],
            "check-for: ENGINE: sglan: expected one of vllm, sglang; did you mean sglang?",
        ),
        (["diff", "a", "b", "--top", "-1"], "diff: --top: -1: expected a whole number from 0"),
    ],
)
def test_a_wrong_name_is_answered_with_the_nearest(words, message):
    with pytest.raises(ConfigError) as caught:
        run_command(words)
    assert str(caught.value).startswith(message)


def warnings_of(*categories, options=()):
    """What `ft-ckpt` prints if these warnings are raised while a command runs, and one of its
    own.
    """
    pairs = ", ".join(f"({name!r}, {category})" for name, category in categories)
    command = [sys.executable, *options, "-c", WARNING.format(categories=f"[{pairs}]")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()


def test_a_warning_of_a_library_is_printed_once_under_its_name():
    expected = [
        "transformers: UserWarning about \\x1b[2J",
        "six: RuntimeWarning about \\x1b[2J",
        "ft-ckpt: runs/a: left out",
    ]
    assert warnings_of((TRANSFORMERS, "UserWarning"), (SINGLE, "RuntimeWarning")) == expected


def test_deprecations_in_libraries_are_printed_only_on_request():
    raised = [(TRANSFORMERS, "FutureWarning"), (TRANSFORMERS, "DeprecationWarning")]
    assert warnings_of(*raised) == ["ft-ckpt: runs/a: left out"]
    assert warnings_of(*raised, options=("-W", "always"))[:2] == [
        "transformers: FutureWarning about \\x1b[2J",
        "transformers: DeprecationWarning about \\x1b[2J",
    ]
