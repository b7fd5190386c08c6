"""Makes text safe for terminals and logs: names, file contents, URLs and answers of servers.

Every error, warning, log record and line of output passes `printable`, which escapes control
characters and removes secrets from URLs. Nothing else in ft_ckpt calls `warnings.warn` or
`logging.getLogger`, and only `cli.options` calls `print`.
"""

import logging
import re
import reprlib
import sys
import warnings
from collections.abc import Iterable
from difflib import get_close_matches
from types import FrameType
from typing import Any

SECRET = "***"  # noqa: S105 - a placeholder, not a secret
# The text may be hostile and long. So each repetition inside another one has a bound.
_USER_INFO = re.compile(
    r"""
    (?P<mark>
        ://                                  # s3://KEY:SECRET@bucket
      | (?: (?<![\w/.:-])//                  # //user:SECRET@host/share, without a scheme
          | :/                               # s3:/KEY:SECRET@bucket, as a Path has it
        ) (?= [^\s/@]* : )
    )
    (?:
        (?P<user>
            [^\s/]*                          # KEY:SECRET@
          | [^\s/@:\[]+:                     # KEY:SE/CRET@, a slash in the password,
            (?! \d{1,5}/ ) \S{0,100}         # but not host:9000/a@b, which has a port
        ) @
      | (?<=://)
        (?P<rest>
            [^\s/@:\[\]'\"]+:               # KEY:SECR, cut off by a message,
            (?! \d{1,5}\b ) [^\s/@'\"]+     # but not host:9000
        )
    )
    """,
    re.VERBOSE,
)
_PARAMETER = re.compile(
    r"""
    (                                        # ?X-Amz-Signature=, &access_token=, %3Fsig%3D
        (?: [?&;#] | %3F | %26 )
        [^\s=&;?%]{0,60}?
        (?: sig | token | secret | key | cred | pass | pwd | auth | session )
        [^\s=&;?%]{0,60}
        (?: = | %3D )
    )
    (?:
        (?! %26 | [:,.)]+ (?: \s | $ ) )     # the value ends before "%26", and before ": no such"
        [^\s&;'\"<>]
    )+
    """,
    re.IGNORECASE | re.VERBOSE,
)
_TOKEN = re.compile(
    r"""
    (?P<kind> \bhf_ ) [A-Za-z0-9]{30,}       # hf_ and the 34 characters of a token of the Hub
  | (?P<scheme> \bbearer\s{1,9} )            # Authorization: Bearer S3.E-C_RET
    (?= [^\s'\"]{0,200}\d ) [\w.~+/=-]{8,}  # but not "a bearer authentication", without a digit
    """,
    re.IGNORECASE | re.VERBOSE,
)
# Packages whose frames are skipped to find the user's line. The stack of a thread of ft_ckpt has no
# other frames, because it ends in `threading`.
_PASSED_PACKAGES = {"ft_ckpt", "concurrent", "contextlib", "functools", "threading"}
# schemes of URLs whose user info without ":" is no secret, but a container or a user
_NAMED_CONTAINER = re.compile(r"(abfss?|wasbs?|ssh|sftp|git)$")


def install_hint(name: str) -> str:
    """Return the advice to install an extra, for an error about a missing library."""
    return f"install the extra {name} (docs/install.md)"


def without_secrets(text: str) -> str:
    """Replace tokens, user info in URLs and signing parameters of URLs by "***".

    URLs are recognized with and without a scheme.
    """
    text = _TOKEN.sub(lambda token: f"{token['kind'] or token['scheme']}{SECRET}", text)
    if ":" in text:
        text = _USER_INFO.sub(_hide_user_info, text)
    if "=" in text or "%3" in text:
        text = _PARAMETER.sub(rf"\g<1>{SECRET}", text)
    return text


def printable(text: str) -> str:
    r"""Return `text` in one line, without secrets and without unprintable characters.

    Characters that `str.isprintable` refuses are escaped, as in "\x1b" and "\n": control
    characters, line separators, marks of direction, and surrogates (undecodable bytes of file
    names).
    """
    if not text.isprintable():
        text = "".join(
            char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
        )
    return without_secrets(text)


class _CleanRepr(reprlib.Repr):
    def repr_str(self, x: str, level: int) -> str:
        return super().repr_str(without_secrets(x), level)

    def repr_instance(self, x: Any, level: int) -> str:
        try:
            text = without_secrets(repr(x))
        except Exception:  # noqa: BLE001 - of an object of any class
            return super().repr_instance(x, level)
        if len(text) <= self.maxother:
            return text
        half = (self.maxother - 3) // 2
        return f"{text[:half]}...{text[3 + half - self.maxother :]}"


def short_repr(value: Any, max_chars: int = 30) -> str:
    """Shorten `repr(value)` to a few elements of containers and `max_chars` of each text.

    Secrets are removed before the text is shortened, because they cannot be recognized in a part of
    a URL.
    """
    shortened = _CleanRepr()
    shortened.maxstring = shortened.maxother = max_chars
    return shortened.repr(value)


def printable_lines(text: str) -> str:
    """Make each line of `text` printable, and keep the line breaks."""
    return "\n".join(map(printable, text.split("\n")))


def clean_causes(error: BaseException | None) -> None:
    """Make the messages of a library's error and of its causes printable, for tracebacks."""
    while error is not None:
        args = [printable_lines(arg) if isinstance(arg, str) else arg for arg in error.args]
        error.args = tuple(args)
        error = error.__cause__ or error.__context__


def nearest_names(words: Iterable[str], choices: Iterable[str]) -> list[str]:
    """Return for each of `words` the choice nearest to it, without duplicates.

    A word without a near choice is skipped.
    """
    names = list(choices)
    nearest: dict[str, None] = {}
    for word in words:
        nearest.update(dict.fromkeys(get_close_matches(word, names, n=1)))
    return list(nearest)


def did_you_mean(words: Iterable[str], choices: Iterable[str]) -> str:
    """Return "did you mean ...?" with the choices near to `words`; "" if none is near."""
    nearest = nearest_names(words, choices)
    return f"did you mean {', '.join(nearest)}?" if nearest else ""


def expected_one_of(word: str, choices: Iterable[str]) -> str:
    """Return "expected one of ...", then the choice nearest to the unknown `word`, if any."""
    names = list(choices)
    text = f"expected one of {', '.join(names)}"
    question = did_you_mean([word], names)
    return f"{text}; {question}" if question else text


class CheckpointWarning(UserWarning):
    """A warning of ft_ckpt."""


def warn(text: str) -> None:
    """Issue a CheckpointWarning that names the line of the user's program that called ft_ckpt.

    In a thread of ft_ckpt and at the end of the process there is no such line: then the warning
    names the line that called `warn`.
    """
    warnings.warn(printable(text), CheckpointWarning, stacklevel=_level_of_user())


def _level_of_user() -> int:
    """Return the `stacklevel` with which `warn` names the innermost line outside of ft_ckpt."""
    frame: FrameType | None = sys._getframe(2)  # the caller of `warn`
    level = 2
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package not in _PASSED_PACKAGES:
            return level
        frame = frame.f_back
        level += 1
    return 2


def _hide_user_info(match: re.Match[str]) -> str:
    """Return the text of a match of _USER_INFO without its secret."""
    if match["rest"]:
        return f"{match['mark']}{SECRET}"
    scheme = match.string[max(0, match.start() - 5) : match.start()]
    is_container = ":" not in match["user"] and _NAMED_CONTAINER.search(scheme) is not None
    return match[0] if is_container else f"{match['mark']}{SECRET}@"


def _clean_record(record: logging.LogRecord) -> bool:
    """Make the message of a log record printable. A filter of logging; it keeps every record."""
    record.msg = printable(record.getMessage())
    record.args = None
    return True


LOG = logging.getLogger("ft_ckpt")
LOG.addFilter(_clean_record)


def announce(text: str) -> None:
    """Log a sentence for the user of a run, or write it to stderr if no logger is configured.

    `logging.getLogger("ft_ckpt").setLevel(logging.WARNING)` silences it.
    """
    if LOG.level or LOG.hasHandlers():
        LOG.info("%s", text)
    elif sys.stderr is not None:
        sys.stderr.write(f"{printable(text)}\n")
        sys.stderr.flush()
