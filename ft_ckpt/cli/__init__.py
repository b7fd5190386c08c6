"""`ft-ckpt`: list, verify, compare, convert and prune checkpoints.

A command's module is imported when the command is called. It declares the arguments, calls the library and prints. Only
`plan`, `report`, `doctor` and `check-resume` compute their results here. Begin at the table of commands below.
"""

import os
import sys
import traceback
import warnings
from argparse import ArgumentParser
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from ft_ckpt._version import __version__
from ft_ckpt.cli.options import accept_any_text, checked_output, print_lines
from ft_ckpt.errors import CheckpointError, ConfigError

_NAME = "ft-ckpt"
COMMANDS = {  # name: module that declares it in `add_<name>`, usage, summary
    "ls": ("show", "RUN [OPTIONS]", "List the checkpoints of a run."),
    "latest": ("show", "RUN [OPTIONS]", "Print the path of the newest valid checkpoint."),
    "best": ("show", "RUN [OPTIONS]", "Print the path of the checkpoint with the best metric."),
    "show": ("show", "PATH [OPTIONS]", "List the parts and tensors of a checkpoint or weight file."),
    "verify": ("show", "PATH [OPTIONS]", "Compare a checkpoint, or all of a run, with its manifest."),
    "sign": ("sign", "CHECKPOINT --key PRIVATE [OPTIONS]", "Sign a checkpoint, in OpenSSF's model-signing format."),
    "diff": ("files", "A B [OPTIONS]", "Compare the tensors of two checkpoints or files."),
    "average": ("files", "A B ... OUT [OPTIONS]", "Write the average of checkpoints."),
    "merge": ("files", "ADAPTER OUT [OPTIONS]", "Merge an adapter into its base."),
    "convert": ("files", "SRC DST [OPTIONS]", "Write weights in another format."),
    "cp": ("transfer", "SOURCE DESTINATION [OPTIONS]", "Copy a checkpoint to another place."),
    "sync": ("transfer", "SOURCE DESTINATION [OPTIONS]", "Copy the checkpoints of a run to another place."),
    "push": ("transfer", "CHECKPOINT URL [OPTIONS]", "Push a checkpoint to the Hub, or to a bucket."),
    "pull": ("transfer", "URL [FOLDER] [OPTIONS]", "Fetch a checkpoint from the Hub, or from a bucket."),
    "publish": ("engines", "CHECKPOINT URL ... [OPTIONS]", "Load a checkpoint into running servers, and check them."),
    "export": ("engines", "ADAPTER OUT --for ENGINE [OPTIONS]", "Write an adapter as an engine reads it."),
    "check-for": ("engines", "ENGINE FOLDER [OPTIONS]", "List what an engine would misread."),
    "watch": ("watch", "RUN [OPTIONS] -- COMMAND", "Measure each new checkpoint of a run by a command."),
    "doctor": ("doctor", "PLACE [OPTIONS]", "Test a folder or bucket for everything that saves rely on."),
    "prune": ("prune", "RUN [OPTIONS]", "Delete the checkpoints that no rule keeps."),
    "pin": ("prune", "PATH [OPTIONS]", "Protect a checkpoint from every rule."),
    "unpin": ("prune", "PATH", "Let the rules decide about a checkpoint again."),
    "plan": ("plan", "[FOLDER] [OPTIONS]", "Compare the cost of save intervals."),
    "report": ("report", "RUN [OPTIONS]", "Draw a run on one page: metrics, saves, sizes, drift."),
    "check-resume": ("check", "[OPTIONS] SCRIPT [ARGS]", "Prove that a script resumes exactly."),
}
_COMPLETE = "_FT_CKPT_COMPLETE"  # set by the shell functions below: print completions instead of running the command
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
    "fish": "complete -c ft-ckpt -a '(_FT_CKPT_COMPLETE=1 ft-ckpt (commandline -opc)[2..] (commandline -ct))'",
}


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        command = self.prog.removeprefix(_NAME).strip()
        raise ConfigError(f"{command + ': ' if command else ''}{message}; see `{self.prog} --help`")

    def completions(self, word: str) -> list[str]:
        return [name for name in self._option_string_actions if word.startswith("-") and name.startswith(word)]


def main() -> NoReturn:
    """Run `ft-ckpt` on the arguments of the process.

    Exit code 0; 1 when a check failed, a comparison found differences, or there was nothing to undo; 2 for an error,
    printed in one line; 141 on a broken pipe.
    """
    accept_any_text()
    sys.excepthook = lambda *crash: print_lines(
        *"".join(traceback.format_exception(*crash)).split("\n"), file=sys.stderr
    )
    warnings.showwarning = lambda message, *_rest, **_more: print_lines(f"{_NAME}: {message}", file=sys.stderr)
    try:
        sys.exit(run_command(sys.argv[1:]))
    except (CheckpointError, OSError) as error:
        print_lines(f"{_NAME}: {error}", file=sys.stderr)
        sys.exit(2)


def run_command(words: Sequence[str]) -> int:
    """Run one command and return its exit code.

    Raises the command's CheckpointError or OSError, and SystemExit after --help and --version.
    """
    with checked_output():
        if _COMPLETE in os.environ:
            print_lines(*_completions(words))
            return 0
        if not words or words[0] not in COMMANDS:
            return _run_without_command(words or ["--help"])
        parser = _command_parser(words[0])
        # Only the intermixed parser takes options after a variable number of arguments. For these two commands, all
        # words after the script or after -- belong to the script or command.
        parse = parser.parse_args if words[0] in ("check-resume", "watch") else parser.parse_intermixed_args
        options = parse(words[1:])
        return options.run(options) or 0


def _command_parser(name: str) -> _Parser:
    module, usage, _ = COMMANDS[name]
    parser = _Parser(f"{_NAME} {name}", f"%(prog)s {usage}", allow_abbrev=False)
    getattr(import_module(f"ft_ckpt.cli.{module}"), f"add_{name.replace('-', '_')}")(parser)
    parser.description = parser.get_default("run").__doc__
    return parser


def _run_without_command(words: Sequence[str]) -> int:
    parser = _global_parser()
    options = parser.parse_args(words)
    if options.show_completion:
        shell = Path(os.environ.get("SHELL", "bash")).name
        print_lines(*_COMPLETIONS.get(shell, _COMPLETIONS["bash"]).split("\n"))
        return 0
    raise ConfigError(f"no command given; see `{_NAME} --help`")


def _global_parser() -> _Parser:
    parser = _Parser(_NAME, "%(prog)s [OPTIONS] COMMAND [ARGS]...", allow_abbrev=False)
    parser.description = "List, verify, compare and prune the checkpoints of ft_ckpt."
    parser.add_argument("--version", action="version", version=f"{_NAME} {__version__}", help="Print version.")
    parser.add_argument(
        "--show-completion",
        action="store_true",
        help='Print what $SHELL needs to complete words, as in eval "$(ft-ckpt --show-completion)".',
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for name, (_, _, summary) in COMMANDS.items():
        commands.add_parser(name, help=summary)
    return parser


def _completions(words: Sequence[str]) -> list[str]:
    """The commands or options that begin with the last word."""
    if len(words) < 2:
        known = [name for name in COMMANDS if name.startswith(words[0] if words else "")]
        return known or _global_parser().completions(words[0])
    return _command_parser(words[0]).completions(words[-1]) if words[0] in COMMANDS else []


def tensorflow_to_h5() -> None:
    """`tensorflow-to-h5 SRC DST`: convert a TensorFlow checkpoint to an HDF5 file, as `ft-ckpt convert` does."""
    sys.argv[1:] = ["convert", *sys.argv[1:], "--format", "h5"]
    main()


def h5_to_tensorflow() -> None:
    """`h5-to-tensorflow SRC DST`: convert a file to a TensorFlow checkpoint folder, as `ft-ckpt convert` does."""
    sys.argv[1:] = ["convert", *sys.argv[1:], "--format", "tensorflow"]
    main()
