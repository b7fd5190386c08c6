"""Reads models of Keras: its HDF5 files (whole models and weights alone, of Keras 2 and 3) and
`.keras` archives.

Tensors are named after the layers of the model: `encoder/dense/kernel` where the file names
variables, as whole models do, and `encoder/dense/0` where it numbers them, as `.weights.h5` does.
Tensors of optimizers are left out by name. No model is built and nothing is executed: the config is
kept as text in the metadata.
"""

import json
import re
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import h5py

from ft_ckpt.errors import CorruptError, LoadError, damaged_input, listing
from ft_ckpt.extensions.hdf5 import open_foreign, open_hdf5
from ft_ckpt.formats import (
    ITEM_BYTES,
    MOST_LEVELS,
    ZIP_MAGIC,
    FileStream,
    IndexedFile,
    RawFile,
    TensorIndex,
    TreeFile,
    record_span,
)

# attributes of whole models and of Keras 2's weights
_LAYERS, _WEIGHTS = "layer_names", "weight_names"
_MODEL, _OPTIMIZER = "model_weights", ("optimizer_weights", "optimizer")
_VARIABLES = "vars"  # the last group of every path in a .weights.h5
_TOP_LEVEL = "top_level_model_weights"
_INNER, _CONFIG, _FACTS = "model.weights.h5", "config.json", "metadata.json"  # files in an archive
_MOST_CONFIG_BYTES = 64 << 20


@dataclass(frozen=True)
class _Naming:
    """Paths in the file by name of the tensor, and the metadata of the model."""

    places: Mapping[str, str]
    metadata: Mapping[str, str]


def is_keras_archive(file: RawFile) -> bool:
    """True when the file is a zip file that begins with a record of Keras."""
    head = bytes(file.bytes(0, min(64, file.size_bytes)))
    return head.startswith(ZIP_MAGIC) and head[30:].startswith(
        (_FACTS.encode(), _CONFIG.encode(), _INNER.encode())
    )


def open_hdf5_tensors(raw: RawFile) -> TreeFile:
    """The tensors of an HDF5 file: a Keras model's under its names, others under their paths.

    Raises CorruptError when the file is damaged or the tensors that it lists are not in it.
    """
    file = open_hdf5(RawFile(raw.file, mapped=False))
    if file.library is None:
        return TreeFile(file)
    with damaged_input(f"{raw.name}: an HDF5 file"):
        naming = _model_naming(file) or _numbered_naming(file, {})
    return TreeFile(file if naming is None else _named_file(file, naming))


def open_keras_archive(raw: RawFile, verify: bool = False) -> IndexedFile:
    """The tensors in a `.keras` archive, whose HDF5 file is read in place.

    Raises LoadError for an archive with weights of another kind, CorruptError when it is damaged.
    """
    with damaged_input(f"{raw.name}: an archive of Keras"):
        archive = zipfile.ZipFile(FileStream(raw))
        names = archive.namelist()
        others = [name for name in names if name not in (_INNER, _CONFIG, _FACTS)]
        if _INNER not in names:
            raise LoadError(
                f"{raw.name}: no {_INNER} in it, but {listing(others, ', ') or 'nothing'}; save it "
                "again with Keras"
            )
        damaged = archive.testzip()
        if damaged is not None:
            raise CorruptError(
                f"{raw.name}: {damaged} is damaged (its checksum differs); use "
                "another copy of the file"
            )
        config, facts = (_read_archive_document(archive, name) for name in (_CONFIG, _FACTS))
        start, stop = record_span(raw, archive.getinfo(_INNER))
        file = open_foreign(raw, verify, (start, stop - start))
        naming = _numbered_naming(file, _config_names(config, ""))
        if naming is None:
            raise CorruptError(
                f"{_INNER}: other names than those of a model's variables; use another copy"
            )
        metadata = {
            key: value if isinstance(value, str) else json.dumps(value)
            for key, value in facts.items()
        }
        named = _named_file(
            file, _Naming(naming.places, {**metadata, "model_config": json.dumps(config)})
        )
    named.skipped += tuple(f"{name}: a file of the archive" for name in others)
    return named


def _read_archive_document(archive: zipfile.ZipFile, name: str) -> dict[str, Any]:
    if name not in archive.namelist():
        return {}
    size_bytes = archive.getinfo(name).file_size
    if size_bytes > _MOST_CONFIG_BYTES:
        raise CorruptError(f"{name}: {size_bytes:,} bytes of text; use another copy")
    document = json.loads(archive.read(name))
    return document if isinstance(document, dict) else {}


# Names


def _model_naming(file: IndexedFile) -> _Naming | None:
    """The names of variables in the model; None if the file does not list them."""
    root = file.library
    place = f"{_MODEL}/" if isinstance(root.get(_MODEL), h5py.Group) else ""
    layers = root[_MODEL] if place else root
    if _LAYERS not in layers.attrs and f"{_LAYERS}0" not in layers.attrs:
        return None
    pairs: list[tuple[str, str]] = []
    for layer in (*_attribute_texts(layers, _LAYERS), _TOP_LEVEL):
        group = layers.get(layer)
        weights = _attribute_texts(group, _WEIGHTS) if isinstance(group, h5py.Group) else ()
        pairs += [(_weight_name(layer, weight), f"{place}{layer}/{weight}") for weight in weights]
    texts = {
        key: _attribute_text(root.attrs[key])
        for key in ("keras_version", "model_config")
        if key in root.attrs
    }
    return _Naming(_unique_names(pairs), texts)


def _weight_name(layer: str, weight: str) -> str:
    """The path of a variable: below its layer, unless it contains it, and without TensorFlow's
    `:0`.
    """
    path = re.sub(r":\d+$", "", weight)
    return path if layer == _TOP_LEVEL or f"/{layer}/" in f"/{path}/" else f"{layer}/{path}"


def _numbered_naming(file: IndexedFile, known: Mapping[str, str]) -> _Naming | None:
    """Names for a file that numbers the variables of each layer; None for any other file.

    The name of a layer is from an attribute of its group, or else from `known`, or else the name of
    the group.
    """
    places = [name for name in file.index.names if name.partition("/")[0] not in _OPTIMIZER]
    if not places or any(_VARIABLES not in place.split("/")[-2:-1] for place in file.index.names):
        return None
    pairs = [
        (_variable_name(file.library, place, known), place)
        for place in sorted(places, key=_natural_path)
    ]
    return _Naming(_unique_names(pairs), {})


def _variable_name(root: Any, place: str, known: Mapping[str, str]) -> str:
    """`layers/dense_1/vars/0` as `name of that layer/0`.

    Groups in `layers` are named after classes.
    """
    *groups, _, number = place.split("/")
    steps: list[str] = []
    path = ""
    for above, step in zip(("", *groups), groups, strict=False):
        path = f"{path}/{step}".lstrip("/")
        if above == "layers":
            variables = root.get(f"{path}/{_VARIABLES}")
            label = variables.attrs.get("name") if isinstance(variables, h5py.Group) else None
            steps[-1:] = [_attribute_text(label) if label is not None else known.get(path, step)]
        else:
            steps.append(step)
    return "/".join((*steps, number))


def _config_names(config: Any, path: str, depth: int = 0) -> dict[str, str]:
    """The names of layers by their groups, from the config: groups are classes in snake case,
    counted in order.
    """
    inner = config.get("config") if isinstance(config, dict) else None
    layers = inner.get("layers") if isinstance(inner, dict) else None
    names: dict[str, str] = {}
    counts: dict[str, int] = {}
    for layer in layers if isinstance(layers, list) and depth < MOST_LEVELS else ():
        kind = _snake_case(str(layer["class_name"]))
        number = counts[kind] = counts.get(kind, -1) + 1
        group = f"{path}layers/{kind}{f'_{number}' if number else ''}"
        names[group] = str(layer["config"]["name"])
        names |= _config_names(layer, f"{group}/", depth + 1)
    return names


def _snake_case(name: str) -> str:
    split = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", name))
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", split).lower()


def _natural_path(place: str) -> list[tuple[int, str]]:  # sort key: numbers by value
    return [(int(step), "") if step.isdecimal() else (-1, step) for step in place.split("/")]


def _unique_names(pairs: list[tuple[str, str]]) -> dict[str, str]:
    """Locations by name, or by their own paths if a name is ambiguous.

    Raises CorruptError for duplicates.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        found = {place: place for _, place in pairs}
    if len(found) < len(pairs):
        raise CorruptError("a weight is listed twice")
    return found


def _attribute_texts(group: Any, key: str) -> Iterator[str]:
    """A list of strings in the attributes of a group; Keras splits long lists into several
    attributes.
    """
    parts = [key] if key in group.attrs else []
    while f"{key}{len(parts)}" in group.attrs and parts[:1] != [key]:
        parts.append(f"{key}{len(parts)}")
    for part in parts:
        yield from (_attribute_text(one) for one in group.attrs[part])


def _attribute_text(value: Any) -> str:
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


# Tensors


def _named_file(file: IndexedFile, naming: _Naming) -> IndexedFile:
    """`file` with its tensors under the names of `naming`.

    Raises CorruptError naming those that are missing.
    """
    rows: dict[str, Any] = {}
    readers, skipped = {}, []
    lost = [place for place in naming.places.values() if place not in file.index.rows]
    if lost:
        raise CorruptError(
            f"{listing(lost, ', ')}: listed as weights, but not in the file; use another copy"
        )
    for name, place in naming.places.items():
        row, kind = file.index.rows[place], _stored_kind(file, place)
        if kind is None:
            skipped.append(f"{name}: values of a type that the file does not name ({row[0]})")
            continue
        start = file.library[place].id.get_offset() if kind != row[0] else None
        rows[name] = [kind, row[1], row[2] if start is None else start, "", len(rows)]
        if place in file.readers and start is None:
            readers[name] = file.readers[place]
    metadata = {
        key: value for key, value in naming.metadata.items() if value not in rows
    }  # a value equal to a tensor's name would be read as a tie
    found = IndexedFile(
        file.raw, TensorIndex(rows, None, metadata, file.index.data_start), file.verify
    )
    found.readers, found.library = readers, file.library
    found.skipped = (*skipped, *_describe_others(file, naming))
    return found


def _stored_kind(file: IndexedFile, place: str) -> str | None:
    """torch's name of a tensor's dtype; Keras stores dtypes unknown to HDF5 as bytes, with or
    without a label.
    """
    kind = file.index.rows[place][0]
    if kind in ITEM_BYTES:
        return str(kind)
    dataset = file.library[place]
    label = _attribute_text(
        dataset.attrs.get("dtype", "bfloat16" if dataset.dtype.itemsize == 2 else "")
    )
    is_plain = (
        dataset.dtype.kind == "V"
        and dataset.dtype.names is None
        and dataset.id.get_offset() is not None
    )
    return label if is_plain and ITEM_BYTES.get(label) == dataset.dtype.itemsize else None


def _describe_others(file: IndexedFile, naming: _Naming) -> Iterator[str]:
    """A line for each group with tensors that do not belong to the model."""
    used = set(naming.places.values())
    counts = Counter(place.partition("/")[0] for place in file.index.names if place not in used)
    yield from (
        f"{group}: {count} tensors that are not the model's" for group, count in counts.items()
    )
