"""Tables of parameters on the page of the API, by an extension of griffe.

griffe reads the docstrings for mkdocstrings.

A docstring describes a parameter in a sentence that begins with its name, "`base`: the model of an
adapter.", and goes on to the next such sentence or the end of the paragraph. Each becomes a row;
the other sentences stay as they are.
"""

import re
from collections.abc import Collection
from itertools import zip_longest
from typing import Any

import griffe

_DESCRIPTION = re.compile(r"(?:(?<=^)|(?<=\.\s)|(?<=\.\s\s))`(\*{0,2}\w+)`: ")


class ParameterTables(griffe.Extension):
    """Moves the descriptions of parameters into a section that is rendered as a table."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        _move_descriptions(func, [parameter.name for parameter in func.parameters])

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        _move_descriptions(cls, [parameter.name for parameter in cls.parameters])


def _move_descriptions(item: griffe.Function | griffe.Class, parameters: Collection[str]) -> None:
    if item.docstring is None:
        return
    text, rows = split_descriptions(item.docstring.value, parameters)
    if rows:
        lines = [f"    {name}: {description}" for name, description in rows.items()]
        item.docstring.value = "\n".join([text, "", "Args:", *lines])


def split_descriptions(docstring: str, parameters: Collection[str]) -> tuple[str, dict[str, str]]:
    """Return the docstring without the descriptions of `parameters`, and these by name."""
    paragraphs: list[str] = []
    rows: dict[str, str] = {}
    for text in docstring.split("\n\n"):
        if not text.startswith((" ", "- ", "```")):
            text = " ".join(text.split())
        starts = [match for match in _DESCRIPTION.finditer(text) if match[1] in parameters]
        for match, following in zip_longest(starts, starts[1:]):
            end = following.start() if following else len(text)
            rows[match[1]] = text[match.end() : end].strip()
        rest = text[: starts[0].start()].strip() if starts else text
        if rest:
            paragraphs.append(rest)
    return "\n\n".join(paragraphs), rows
