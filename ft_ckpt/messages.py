"""Text for terminals and logs.

Names, file contents, URLs and server responses are made printable here.

Every error, warning, log record and line of output passes `printable`: control characters are
escaped, secrets in URLs removed. Nothing else in ft_ckpt calls `warnings.warn` or
`logging.getLogger`, and only `cli.options` calls `print`.
"""

import logging
import re
import reprlib
import sys
import warnings
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

SECRET = "***"  # noqa: S105 - a placeholder, not a secret
# Bounded repetitions: the text may be hostile, and long.
_USER_INFO = re.compile(
    # without a scheme, or with one slash, as a Path has it
    r"(?P<mark>://|(?:(?<![\w/.:-])//|:/)(?=[^\s/@]*:))"
    r"(?:(?P<user>[^\s/]*|[^\s/@:\[]+:(?!\d{1,5}/)\S{0,100})@"  # with a slash in the password, too
    # no port: user info cut short by a message
    r"|(?<=://)(?P<rest>[^\s/@:\[\]'\"]+:(?!\d{1,5}\b)[^\s/@'\"]+))"
)
_PARAMETER = re.compile(
    r"((?:[?&;#]|%3F|%26)[^\s=&;?%]{0,60}?(?:sig|token|secret|key|cred|pass|pwd|auth|session)[^\s=&;?%]{0,60}(?:=|%3D))"
    r"(?:(?!%26|[:,.)]+(?:\s|$))[^\s&;'\"<>])+",
    re.IGNORECASE,
)
_TOKEN = re.compile(
    r"(?P<kind>\bhf_)[A-Za-z0-9]{30,}|(?P<scheme>\bbearer\s{1,9})(?=[^\s'\"]{0,200}\d)[\w.~+/=-]{8,}",
    re.IGNORECASE,
)
# schemes whose user info without ":" is no secret
_NAMED_CONTAINER = re.compile(r"(abfss?|wasbs?|ssh|sftp|git)$")


def install_extra(name: str) -> str:
    """What to do where a library of an extra of the package is missing."""
    return f"install the extra {name} (docs/install.md)"


def without_secrets(text: str) -> str:
    """`text` with "***" for tokens, and for user info and signing parameters in URLs, with or
    without a scheme.
    """
    text = _TOKEN.sub(lambda found: f"{found['kind'] or found['scheme']}{SECRET}", text)
    if ":" in text:
        text = _USER_INFO.sub(_hide_user_info, text)
    return _PARAMETER.sub(rf"\g<1>{SECRET}", text) if "=" in text or "%3" in text else text


def printable(text: str) -> str:
    r"""`text` without secrets, in one line: what `str.isprintable` refuses is escaped, as in "\x1b"
    and "\n".

    These are control characters, line separators, marks of direction, and surrogates (undecodable
    bytes of file names).
    """
    if not text.isprintable():
        text = "".join(
            one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
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
        half = (self.maxother - 3) // 2
        return (
            text
            if len(text) <= self.maxother
            else f"{text[:half]}...{text[3 + half - self.maxother :]}"
        )


def short(value: Any, most: int = 30) -> str:
    """`repr(value)` with a few elements of containers and `most` characters of each text or object,
    from its ends.

    Secrets are removed before shortening: in a part of a URL they are not recognised.
    """
    shortened = _CleanRepr()
    shortened.maxstring = shortened.maxother = most
    return shortened.repr(value)


def printable_lines(text: str) -> str:
    """The lines of `text`, each printable."""
    return "\n".join(map(printable, text.split("\n")))


def clean_causes(error: BaseException | None) -> None:
    """Make the messages of a library's error and its causes printable in place: tracebacks show
    them.
    """
    while error is not None:
        error.args = tuple(
            printable_lines(arg) if isinstance(arg, str) else arg for arg in error.args
        )
        error = error.__cause__ or error.__context__


def nearest_names(words: Iterable[str], choices: Iterable[str]) -> list[str]:
    """The choice nearest to each of `words`, if one is near; each once."""
    names = list(choices)
    nearest: dict[str, None] = {}
    for word in words:
        nearest.update(dict.fromkeys(get_close_matches(word, names, n=1)))
    return list(nearest)


def did_you_mean(words: Iterable[str], choices: Iterable[str]) -> str:
    """The question "did you mean ...?" with the choice nearest to each of `words`; "" if none is
    near.
    """
    nearest = nearest_names(words, choices)
    return f"did you mean {', '.join(nearest)}?" if nearest else ""


def expected_one_of(word: str, choices: Iterable[str]) -> str:
    """The text "expected one of ...", then the choice nearest to the unknown `word`, if one is
    near.
    """
    names = list(choices)
    question = did_you_mean([word], names)
    return f"expected one of {', '.join(names)}{'; ' if question else ''}{question}"


class CheckpointWarning(UserWarning):
    """A warning of this project."""


def warn(text: str, stacklevel: int = 1) -> None:
    warnings.warn(printable(text), CheckpointWarning, stacklevel=stacklevel + 1)


def _hide_user_info(found: re.Match[str]) -> str:
    scheme = found.string[max(0, found.start() - 5) : found.start()]
    is_name = not found["rest"] and ":" not in found["user"] and _NAMED_CONTAINER.search(scheme)
    return found[0] if is_name else f"{found['mark']}{SECRET}{'' if found['rest'] else '@'}"


def _clean_record(record: logging.LogRecord) -> bool:
    record.msg, record.args = printable(record.getMessage()), None
    return True


LOG = logging.getLogger("ft_ckpt")
LOG.addFilter(_clean_record)


def announce(text: str) -> None:
    """Tell the user of a run one fact: as a record of the logger, or on stderr in a program that
    configures no logging.

    `logging.getLogger("ft_ckpt").setLevel(logging.WARNING)` silences it.
    """
    if LOG.level or LOG.hasHandlers():
        LOG.info("%s", text)
    elif sys.stderr is not None:
        sys.stderr.write(f"{printable(text)}\n")
        sys.stderr.flush()
