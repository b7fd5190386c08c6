"""Checkpoints with terminal escapes and secrets in fields and names, and records of what is logged.

A trial puts a mark into one field (of a manifest, a config, a tokenizer, an index, a training
state, a safetensors header), into the name of a file or folder, or into a pin or a lease.
"""

import json
import logging
import os
import random
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from commands import MARK, NAME_MARK
from seeds import chosen_seed
from small_checkpoints import edit, rewrite_manifest

from ft_ckpt.messages import CheckpointWarning


class Trial(NamedTuple):
    """Where a mark goes: folder, file, place in the file's JSON, and how it is put there."""

    root: str
    file: str
    place: tuple[Any, ...]
    how: str


def trials_in(folder: Path, roots: Iterable[str]) -> list[Trial]:
    """Return one trial for each field and each file.

    Of those that differ in numbers or names of tensors alone, one is drawn.
    """
    trials: list[Trial] = []
    for root in roots:
        trials += _all_trials(folder, root)
    random.Random(chosen_seed()).shuffle(trials)
    kinds = {}
    for trial in trials:
        kind = re.sub(r"\d+|'[^']*[./][^']*'", "*", repr(trial.place))
        kinds[trial.root, re.sub(r"\d+-of", "*", trial.file), kind, trial.how] = trial
    return sorted(kinds.values(), key=repr)


def _all_trials(folder: Path, root: str) -> Iterator[Trial]:
    for path in sorted((folder / root).rglob("*")):
        if not path.is_file():
            continue
        name = path.relative_to(folder / root).as_posix()
        for how in ("renamed", "renamed on the disk alone", "copied beside"):
            yield Trial(root, name, (), how)
        document = _read_json(path)
        if document is None:
            yield Trial(root, name, (), "text")
        else:
            for place, how in _fields_of(document):
                yield Trial(root, name, place, how)
    for name in ("renamed", "beside"):
        yield Trial(root, name, (), "folder")


def _read_json(path: Path) -> Any:
    """Read the JSON in a file, or in the header of a safetensors file; None where there is none."""
    if path.suffix == ".safetensors":
        return json.loads(_header_of(path)[0])
    is_json = path.suffix == ".json" or path.name.startswith(".")
    return json.loads(path.read_text()) if is_json else None


def _header_of(path: Path) -> tuple[bytes, bytes]:
    """Return the header of a safetensors file, and the bytes after it."""
    data = path.read_bytes()
    stop = 8 + int.from_bytes(data[:8], "little")
    return data[8:stop], data[stop:]


def _fields_of(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Yield the place of each field in a JSON value, and whether its value or its key is marked."""
    if place:
        yield place, "value"
    if isinstance(value, (dict, list)):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        for key in keys:
            if isinstance(value, dict):
                yield (*place, key), "key"
            yield from _fields_of(value[key], (*place, key))


def _marked(value: Any, place: tuple[Any, ...], how: str) -> Any:
    """Return a copy of the JSON value with the mark at `place`."""
    if not place:
        return f"{value}{MARK}" if isinstance(value, str) else MARK
    key, *rest = place
    if isinstance(value, list):
        changed = list(value)
        changed[key] = _marked(value[key], tuple(rest), how)
        return changed
    if rest or how == "value":
        return {**value, key: _marked(value[key], tuple(rest), how)}
    return {f"{name}{MARK}" if name == key else name: part for name, part in value.items()}


def put_mark(folder: Path, trial: Trial) -> Path:
    """Put the mark into the checkpoint `folder`, and into its manifest; return where it is now."""
    path = folder / trial.file
    if trial.how == "folder":
        goal = folder.with_name(folder.name + NAME_MARK)
        if trial.file == "renamed":
            return folder.rename(goal)
        shutil.copytree(folder, goal)
    elif trial.how == "copied beside":
        shutil.copy(path, f"{path}{NAME_MARK}")
    elif trial.how.startswith("renamed"):
        path.rename(f"{path}{NAME_MARK}")
        if trial.how == "renamed" and trial.file != "ft_ckpt.json":
            rewrite_manifest(folder, lambda document: _rename(document, trial.file))
    elif trial.how == "text":
        _write_listed(folder, trial.file, os.fsencode(MARK))
    elif trial.file == "ft_ckpt.json" and trial.place == ("digest",):
        path.write_text(json.dumps(_marked(_read_json(path), trial.place, trial.how)))
    elif trial.file == "ft_ckpt.json":
        rewrite_manifest(folder, lambda document: _replace(document, trial))
    else:
        text = json.dumps(_marked(_read_json(path), trial.place, trial.how)).encode()
        if path.suffix == ".safetensors":
            text = len(text).to_bytes(8, "little") + text + _header_of(path)[1]
        _write_listed(folder, trial.file, text)
    return folder


def _write_listed(folder: Path, name: str, data: bytes) -> None:
    (folder / name).unlink(missing_ok=True)
    if name.startswith("."):
        (folder / name).write_bytes(data)
    else:
        edit(folder, name, data)


def _rename(document: dict[str, Any], name: str) -> None:
    for file in document["files"]:
        file["path"] += NAME_MARK if file["path"] == name else ""
    for part in document["parts"]:
        for tensor in part["tensors"]:
            tensor["file"] += NAME_MARK if tensor["file"] == name else ""


def _replace(document: dict[str, Any], trial: Trial) -> None:
    marked = _marked(dict(document), trial.place, trial.how)
    document.clear()
    document.update(marked)


class _Listener(logging.Handler):
    """Keeps the records of the loggers of ft_ckpt, as a formatter would show them."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


@contextmanager
def listening() -> Iterator[list[str]]:
    """List the messages of log records during the block, and after it those of warnings, too."""
    listener, logger = _Listener(), logging.getLogger("ft_ckpt")
    level = logger.level
    logger.addHandler(listener)
    logger.setLevel(logging.DEBUG)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield listener.texts
        for warning in caught:
            if issubclass(warning.category, CheckpointWarning):
                listener.texts.append(str(warning.message))
    finally:
        logger.removeHandler(listener)
        logger.setLevel(level)
