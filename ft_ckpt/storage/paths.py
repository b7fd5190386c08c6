"""Relative paths: those that a store can have, and those that manifests and other files may name."""

import re


def is_name(path: object) -> bool:
    """True for a relative path in its plainest form (no "..", ".", empty step or NUL) that can be a name.

    Surrogates from dc80 to dcff stand for the bytes of a name that is not UTF-8, other ones for nothing.
    """
    if not isinstance(path, str) or re.search("[\0\ud800-\udc7f\udd00-\udfff]", path):
        return False
    return not {"", ".", ".."} & set(path.split("/"))


def is_inside(path: object) -> bool:
    """Whether a file may name `path`: a name that means the same on every system, so without a backslash."""
    return is_name(path) and "\\" not in str(path)


def is_utf8(text: str) -> bool:
    """True when `text` survives UTF-8: it has no lone halves of surrogate pairs."""
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)
