"""`ft-ckpt`: list, verify, compare, convert and prune checkpoints.

A command's module is imported when the command is called. It declares the arguments, calls the
library and prints. Only `plan`, `report`, `doctor` and `check-resume` compute their results here.
Begin at the table of commands below.
"""

import os
import sys
import traceback
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from ft_ckpt._version import __version__
from ft_ckpt.cli.options import accept_any_text, checked_output, print_lines
from ft_ckpt.errors import CheckpointError, ConfigError
from ft_ckpt.messages import CheckpointWarning, did_you_mean, nearest_names

_NAME = "ft-ckpt"


@dataclass(frozen=True)
class Command:
    """A command: the module in `ft_ckpt.cli` that declares it, its usage, and a line for the help.

    The module's function `add_<name>` sets the description and the arguments of the command's
    parser, and the function that runs the command.
    """

    module: str
    usage: str
    summary: str


GROUPS = {
    "see": {
        "ls": Command("show", "RUN [OPTIONS]", "List the checkpoints of a run."),
        "show": Command(
            "show", "PATH [OPTIONS]", "Describe a checkpoint or model: class, size, tensors."
        ),
        "latest": Command(
            "show", "RUN [OPTIONS]", "Print the path of the newest valid checkpoint."
        ),
        "best": Command(
            "show", "RUN [OPTIONS]", "Print the path of the checkpoint with the best metric."
        ),
        "diff": Command(
            "diff", "A B [OPTIONS]", "Compare the tensors of two checkpoints or models."
        ),
        "report": Command(
            "report.command", "RUN [OPTIONS]", "Write a page about a run: metrics, times, sizes."
        ),
    },
    "check": {
        "verify": Command("verify", "PATH [OPTIONS]", "Check that files are as they were saved."),
        "sign": Command("sign", "CHECKPOINT --key PRIVATE [OPTIONS]", "Sign a checkpoint."),
        "check-resume": Command(
            "check", "[OPTIONS] SCRIPT [ARGS]", "Prove that a training script resumes exactly."
        ),
        "doctor": Command(
            "doctor", "PLACE [OPTIONS]", "Test whether a folder or bucket is safe for saves."
        ),
        "plan": Command("plan", "[FOLDER] [OPTIONS]", "Find out how often to save."),
    },
    "keep": {
        "prune": Command(
            "prune", "RUN [OPTIONS]", "Delete all checkpoints of a run that no rule keeps."
        ),
        "pin": Command("prune", "PATH [OPTIONS]", "Protect a checkpoint from deletion."),
        "unpin": Command("prune", "PATH", "End the protection."),
    },
    "move": {
        "cp": Command(
            "transfer",
            "SOURCE DESTINATION [OPTIONS]",
            "Copy a checkpoint to another folder or bucket.",
        ),
        "sync": Command(
            "transfer",
            "SOURCE DESTINATION [OPTIONS]",
            "Copy the checkpoints that another place lacks.",
        ),
        "push": Command(
            "transfer", "CHECKPOINT URL [OPTIONS]", "Upload a checkpoint to the Hub or a bucket."
        ),
        "pull": Command(
            "transfer", "URL [FOLDER] [OPTIONS]", "Download a checkpoint from the Hub or a bucket."
        ),
    },
    "convert": {
        "convert": Command(
            "files", "SRC DST [OPTIONS]", "Write weights in another format or dtype."
        ),
        "merge": Command("merge", "ADAPTER OUT [OPTIONS]", "Merge an adapter into its base model."),
        "average": Command(
            "files", "A B ... OUT [OPTIONS]", "Average the weights of several checkpoints."
        ),
        "export": Command(
            "engines", "ADAPTER OUT --for ENGINE [OPTIONS]", "Write an adapter for vLLM or SGLang."
        ),
    },
    "serve": {
        "publish": Command(
            "engines", "CHECKPOINT URL ... [OPTIONS]", "Load a checkpoint into running servers."
        ),
        "check-for": Command(
            "engines", "ENGINE FOLDER [OPTIONS]", "List what vLLM or SGLang would misread."
        ),
        "watch": Command("watch", "RUN [OPTIONS] -- COMMAND", "Evaluate each checkpoint of a run."),
    },
}
COMMANDS: dict[str, Command] = {}
for _commands in GROUPS.values():
    COMMANDS.update(_commands)
_FAMILIAR_NAMES = {  # what other programs call it
    "check": "verify",
    "clean": "prune",
    "copy": "cp",
    "delete": "prune",
    "download": "pull",
    "evaluate": "watch",
    "gc": "prune",
    "info": "show",
    "inspect": "show",
    "list": "ls",
    "rm": "prune",
    "serve": "publish",
    "upload": "push",
}
# set by the shell functions below: print completions instead of running the command
_COMPLETE = "_FT_CKPT_COMPLETE"
_COMPLETIONS = {
    "bash": """_ft_ckpt_completion() {
  COMPREPLY=($(_FT_CKPT_COMPLETE=1 ft-ckpt "${COMP_WORDS[@]:1:COMP_CWORD}"))
}
complete -o default -F _ft_ckpt_completion ft-ckpt""",
    "zsh": """_ft_ckpt_completion() {
  local found=($(_FT_CKPT_COMPLETE=1 ft-ckpt "${(@)words[2,CURRENT]}"))
  if (( $#found )); then compadd -- $found; else _files; fi
}
compdef _ft_ckpt_completion ft-ckpt""",
    "fish": (
        "complete -c ft-ckpt -a '(_FT_CKPT_COMPLETE=1 ft-ckpt (commandline -opc)[2..] "
        "(commandline -ct))'"
    ),
}


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        command = self.prog.removeprefix(_NAME).strip()
        prefix = f"{command}: " if command else ""
        message = message.removeprefix("argument ")
        message = message.replace("the following arguments are required:", "expected")
        end = " See" if message.endswith("?") else "; see"
        raise ConfigError(f"{prefix}{message}{end} `{self.prog} --help`")

    def read(self, words: Sequence[str], *, mixed: bool) -> Namespace:
        """Parse the arguments and options in `words`.

        With `mixed`, options may follow a variable number of arguments.
        """
        parse = self.parse_known_intermixed_args if mixed else self.parse_known_args
        options, surplus = parse(words)
        if surplus:
            self.error(self._surplus_text(surplus))
        return options

    def _surplus_text(self, words: Sequence[str]) -> str:
        unknown = [word.partition("=")[0] for word in words if word.startswith("-")]
        if not unknown:
            return f"{words[0]}: one argument too many"
        # Without the dashes, which would count as likeness.
        names = [name.lstrip("-") for name in self._option_string_actions]
        nearest = nearest_names([unknown[0].lstrip("-")], names)
        question = f"; did you mean --{nearest[0]}?" if nearest else ""
        return f"{unknown[0]}: no such option{question}"

    def completions(self, word: str) -> list[str]:
        if not word.startswith("-"):
            return []
        return [name for name in self._option_string_actions if name.startswith(word)]


class _GlobalParser(_Parser):
    def format_help(self) -> str:
        """List all commands by group, one a line, as narrow as a small terminal."""
        width = max(map(len, COMMANDS))
        indent = max(map(len, GROUPS))
        lines = [f"usage: {_NAME} COMMAND [ARGUMENTS] [OPTIONS]", ""]
        for group, commands in GROUPS.items():
            label = group
            for name, command in commands.items():
                lines.append(f"{label:{indent}}  {name:{width}}  {command.summary}")
                label = ""

        lines += [
            "",
            f"`{_NAME} COMMAND --help` describes a command; --version prints the version, and",
            f'`eval "$({_NAME} --show-completion)"` lets the shell complete words.',
        ]
        return "\n".join(lines) + "\n"


def main() -> NoReturn:
    """Run `ft-ckpt` on the arguments of the process.

    Exit code 0; 1 when a check failed, a comparison found differences, or there was nothing to
    undo; 2 for an error, printed in one line; 141 on a broken pipe.
    """
    accept_any_text()
    sys.excepthook = _print_crash
    warnings.showwarning = _warning_printer()
    try:
        sys.exit(run_command(sys.argv[1:]))
    except (CheckpointError, OSError) as error:
        print_lines(f"{_NAME}: {error}", file=sys.stderr)
        sys.exit(2)


def _print_crash(*crash: Any) -> None:
    text = "".join(traceback.format_exception(*crash))
    print_lines(*text.split("\n"), file=sys.stderr)


def _warning_printer() -> Callable[..., None]:
    """Return a printer of warnings: one line each, those of a library once and with its name.

    The printer replaces Python's own hook, `warnings.showwarning`. Deprecations in libraries do not
    concern the user of a command: they are shown if PYTHONWARNINGS or -W asks for warnings.
    """
    shown = set[str]()

    def print_warning(
        message: Warning | str, category: type[Warning], filename: str, *_rest: object
    ) -> None:
        if issubclass(category, CheckpointWarning):
            print_lines(f"{_NAME}: {message}", file=sys.stderr)
            return
        line = f"{_library_of(filename)}: {message}"
        is_for_developers = issubclass(
            category, (DeprecationWarning, FutureWarning, PendingDeprecationWarning)
        )
        if line in shown or (is_for_developers and not sys.warnoptions):
            return
        shown.add(line)
        print_lines(line, file=sys.stderr)

    return print_warning


def _library_of(filename: str) -> str:
    """Return the installed library that a source file belongs to; "Python" for other files."""
    folders = Path(filename).parts
    for number, folder in enumerate(folders[:-1]):
        if folder in ("site-packages", "dist-packages"):
            return Path(folders[number + 1]).stem
    return "Python"


def run_command(words: Sequence[str]) -> int:
    """Run one command and return its exit code.

    Raises the command's CheckpointError or OSError, and SystemExit after --help and --version.
    """
    with checked_output():
        if _COMPLETE in os.environ:
            print_lines(*_completions(words))
            return 0
        if not words or words[0].startswith("-"):
            return _run_without_command(words or ["--help"])
        if words[0] not in COMMANDS:
            raise ConfigError(f"{words[0]}: no such command; {_instead_of(words[0])}")
        parser = _command_parser(words[0])
        # For these two commands, all words after the script or after -- belong to the script or
        # command.
        options = parser.read(words[1:], mixed=words[0] not in ("check-resume", "watch"))
        return options.run(options) or 0


def _instead_of(word: str) -> str:
    """Suggest what to type instead of a command that does not exist."""
    if word in _FAMILIAR_NAMES:
        return f"use `{_NAME} {_FAMILIAR_NAMES[word]}`"
    if Path(word).exists():
        return (
            f"`{_NAME} ls {word}` lists the checkpoints in a folder, `{_NAME} show {word}` "
            "describes a model"
        )
    question = did_you_mean([word], COMMANDS)
    return f"{question + ' ' if question else ''}`{_NAME} --help` lists the commands"


def _command_parser(name: str) -> _Parser:
    command = COMMANDS[name]
    parser = _Parser(f"{_NAME} {name}", f"%(prog)s {command.usage}", allow_abbrev=False)
    module = import_module(f"ft_ckpt.cli.{command.module}")
    declare_arguments = getattr(module, f"add_{name.replace('-', '_')}")
    declare_arguments(parser)
    return parser


def _run_without_command(words: Sequence[str]) -> int:
    options = _global_parser().read(words, mixed=False)
    if options.show_completion:
        shell = Path(os.environ.get("SHELL", "bash")).name
        print_lines(*_COMPLETIONS.get(shell, _COMPLETIONS["bash"]).split("\n"))
        return 0
    raise ConfigError(f"no command given; see `{_NAME} --help`")


def _global_parser() -> _GlobalParser:
    parser = _GlobalParser(_NAME, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"{_NAME} {__version__}")
    parser.add_argument("--show-completion", action="store_true")
    return parser


def _completions(words: Sequence[str]) -> list[str]:
    """Return the commands or options that begin with the last word."""
    if len(words) < 2:
        word = words[0] if words else ""
        names = [name for name in COMMANDS if name.startswith(word)]
        return names or _global_parser().completions(word)
    if words[0] not in COMMANDS:
        return []
    return _command_parser(words[0]).completions(words[-1])


def tensorflow_to_h5() -> None:
    """Convert a TensorFlow checkpoint to an HDF5 file: `tensorflow-to-h5 SRC DST`."""
    sys.argv[1:] = ["convert", *sys.argv[1:], "--format", "h5"]
    main()


def h5_to_tensorflow() -> None:
    """Convert a file to a TensorFlow checkpoint folder: `h5-to-tensorflow SRC DST`."""
    sys.argv[1:] = ["convert", *sys.argv[1:], "--format", "tensorflow"]
    main()
