"""Relative paths as manifests and other files name them."""

import re


def is_inside(path: object) -> bool:
    """True for a relative path in its plainest form (no "..", ".", empty step, backslash or NUL) that can be a name.

    Surrogates from dc80 to dcff stand for the bytes of a name that is not UTF-8, other ones for nothing.
    """
    if not isinstance(path, str) or re.search("[\\\\\0\ud800-\udc7f\udd00-\udfff]", path):
        return False
    return not {"", ".", ".."} & set(path.split("/"))
