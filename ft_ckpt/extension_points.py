"""Access to code in higher layers, which is named by import strings and imported on use.

An import string is "package.module:name". The tables of formats, stores, wrappers and optimizers
consist of them, so that a lower layer imports no extension, and a process only those that it uses.
Import-linter does not see them; `tests/project/test_extension_points.py` resolves each of them.
"""

from pkgutil import resolve_name
from typing import Any


def load_extension(import_string: str) -> Any:
    """Import the object at "package.module:name", such as a class or a function.

    Raises ImportError if the module or a library that it needs cannot be imported, AttributeError
    if the module has no such name.
    """
    return resolve_name(import_string)
