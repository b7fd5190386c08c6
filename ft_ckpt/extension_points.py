"""Imports code of higher layers when it is used, by import strings.

An import string is "package.module:name". The tables of formats, stores, wrappers and optimizers
consist of import strings. So a lower layer imports no extension, and a process imports only the
extensions that it uses. Import-linter does not see them. The test
`tests/project/test_extension_points.py` resolves each of them.
"""

from pkgutil import resolve_name
from typing import Any


def load_extension(import_string: str) -> Any:
    """Import the object at "package.module:name", such as a class or a function.

    Raises ImportError if the module or a library that it needs cannot be imported, AttributeError
    if the module has no such name.
    """
    return resolve_name(import_string)
