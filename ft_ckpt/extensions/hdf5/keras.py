"""Reads models of Keras from its HDF5 files and `.keras` archives.

An HDF5 file of Keras 2 or 3 has a whole model or only weights. Tensors are named after the layers
of the model. The name is `encoder/dense/kernel` if the file names variables, as whole models do. It
is `encoder/dense/0` if the file numbers them, as `.weights.h5` does. Tensors of optimizers are left
out by name. No model is built and nothing is executed, so the config stays text in the metadata.
"""

import json
import re
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import h5py

from ft_ckpt.errors import CorruptError, LoadError, damaged_input, listing
from ft_ckpt.extensions.hdf5.hdf5 import open_foreign, open_hdf5
from ft_ckpt.formats import ITEM_BYTES
from ft_ckpt.formats.files import ZIP_MAGIC, FileStream, RawFile, TensorView, record_span
from ft_ckpt.formats.index import IndexedFile, TensorIndex, named_tensors
from ft_ckpt.formats.trees import MAX_LEVELS

# attributes of whole models and of Keras 2's weights
_LAYERS, _WEIGHTS = "layer_names", "weight_names"
_MODEL, _OPTIMIZER = "model_weights", ("optimizer_weights", "optimizer")
# the last group of every path in a .weights.h5
_VARIABLES = "vars"
_TOP_LEVEL = "top_level_model_weights"
# files in an archive
_INNER, _CONFIG, _METADATA = "model.weights.h5", "config.json", "metadata.json"
_MAX_CONFIG_BYTES = 64 << 20


@dataclass(frozen=True)
class _Naming:
    """Paths in the file by name of the tensor, and the metadata of the model."""

    paths: Mapping[str, str]
    metadata: Mapping[str, str]


def is_keras_archive(file: RawFile) -> bool:
    """Check whether the file is a zip file that begins with a record of Keras."""
    head = bytes(file.bytes(0, min(64, file.size_bytes)))
    first_names = (_METADATA.encode(), _CONFIG.encode(), _INNER.encode())
    return head.startswith(ZIP_MAGIC) and head[30:].startswith(first_names)


def open_hdf5_weights(raw: RawFile) -> TensorView:
    """Open the tensors of an HDF5 file.

    Those of Keras have the names of the model, and those of other files their paths.

    Raises CorruptError when the file is damaged or the tensors that it lists are not in it.
    """
    file = open_hdf5(raw)
    if file.library is None:
        return named_tensors(file)
    with damaged_input(f"{raw.name}: an HDF5 file"):
        naming = _model_naming(file) or _numbered_naming(file, {})
    return named_tensors(file if naming is None else _named_file(file, naming))


def open_keras_archive(raw: RawFile, verify: bool = False) -> IndexedFile:
    """Open the tensors in a `.keras` archive, whose HDF5 file is read in place.

    Raises LoadError for an archive with weights of another kind, CorruptError when it is damaged.
    """
    with damaged_input(f"{raw.name}: an archive of Keras"):
        archive = zipfile.ZipFile(FileStream(raw))
        names = archive.namelist()
        unread = [name for name in names if name not in (_INNER, _CONFIG, _METADATA)]
        if _INNER not in names:
            raise LoadError(
                f"{raw.name}: no {_INNER} in it, but {listing(unread, ', ') or 'nothing'}; save it "
                "again with Keras"
            )

        damaged = archive.testzip()
        if damaged is not None:
            raise CorruptError(
                f"{raw.name}: {damaged} is damaged (its checksum differs); use "
                "another copy of the file"
            )

        config = _read_archive_document(archive, _CONFIG)
        metadata = {}
        for key, value in _read_archive_document(archive, _METADATA).items():
            metadata[key] = value if isinstance(value, str) else json.dumps(value)
        metadata["model_config"] = json.dumps(config)
        start, stop = record_span(raw, archive.getinfo(_INNER))
        file = open_foreign(raw, verify, (start, stop - start))
        naming = _numbered_naming(file, _config_names(config, ""))
        if naming is None:
            raise CorruptError(
                f"{_INNER}: other names than those of a model's variables; use another copy"
            )

        named = _named_file(file, _Naming(naming.paths, metadata))

    named.skipped = (*named.skipped, *(f"{name}: a file of the archive" for name in unread))
    return named


def _read_archive_document(archive: zipfile.ZipFile, name: str) -> dict[str, Any]:
    if name not in archive.namelist():
        return {}
    size_bytes = archive.getinfo(name).file_size
    if size_bytes > _MAX_CONFIG_BYTES:
        raise CorruptError(f"{name}: {size_bytes:,} bytes of text; use another copy")
    document = json.loads(archive.read(name))
    return document if isinstance(document, dict) else {}


# Names


def _model_naming(file: IndexedFile) -> _Naming | None:
    """Return the names of the model's variables, or None if the file does not list them."""
    root = file.library
    prefix = f"{_MODEL}/" if isinstance(root.get(_MODEL), h5py.Group) else ""
    layers = root[_MODEL] if prefix else root
    if _LAYERS not in layers.attrs and f"{_LAYERS}0" not in layers.attrs:
        return None
    pairs: list[tuple[str, str]] = []
    for layer in (*_attribute_texts(layers, _LAYERS), _TOP_LEVEL):
        group = layers.get(layer)
        weights = _attribute_texts(group, _WEIGHTS) if isinstance(group, h5py.Group) else ()
        pairs += [(_weight_name(layer, weight), f"{prefix}{layer}/{weight}") for weight in weights]

    metadata = {}
    for key in ("keras_version", "model_config"):
        if key in root.attrs:
            metadata[key] = _attribute_text(root.attrs[key])

    return _Naming(_unique_names(pairs), metadata)


def _weight_name(layer: str, weight: str) -> str:
    """Return the name of a variable: the path of its layer and its own, without TensorFlow's `:0`.

    For example, both ("dense", "kernel:0") and ("dense", "dense/kernel:0") become "dense/kernel".
    """
    path = re.sub(r":\d+$", "", weight)
    return path if layer == _TOP_LEVEL or f"/{layer}/" in f"/{path}/" else f"{layer}/{path}"


def _numbered_naming(file: IndexedFile, layer_names: Mapping[str, str]) -> _Naming | None:
    """Name the variables of a file that numbers those of each layer; None for any other file.

    An attribute of a layer's group has its name. Without the attribute the name is looked up in
    `layer_names`, and if it is not there, the name of the group is used.
    """
    for path in file.index.names:
        if path.split("/")[-2:-1] != [_VARIABLES]:
            return None
    paths = [path for path in file.index.names if path.partition("/")[0] not in _OPTIMIZER]
    if not paths:
        return None
    paths.sort(key=_natural_path)
    pairs = [(_variable_name(file.library, path, layer_names), path) for path in paths]
    return _Naming(_unique_names(pairs), {})


def _variable_name(root: Any, variable: str, layer_names: Mapping[str, str]) -> str:
    """Convert `layers/dense_1/vars/0` to `name of that layer/0`.

    Groups in `layers` are named after classes.
    """
    *groups, _, number = variable.split("/")
    steps: list[str] = []
    path = ""
    for parent, step in zip(("", *groups), groups, strict=False):
        path = f"{path}/{step}".lstrip("/")
        if parent != "layers":
            steps.append(step)
            continue
        variables = root.get(f"{path}/{_VARIABLES}")
        label = variables.attrs.get("name") if isinstance(variables, h5py.Group) else None
        # in place of "layers"
        steps[-1] = layer_names.get(path, step) if label is None else _attribute_text(label)
    return "/".join((*steps, number))


def _config_names(config: Any, path: str, depth: int = 0) -> dict[str, str]:
    """Return the names of layers by their groups in the file, from the config.

    Groups are classes in snake case, counted in order.
    """
    inner = config.get("config") if isinstance(config, dict) else None
    layers = inner.get("layers") if isinstance(inner, dict) else None
    if not isinstance(layers, list) or depth >= MAX_LEVELS:
        return {}
    names: dict[str, str] = {}
    counts = Counter[str]()
    for layer in layers:
        kind = _snake_case(str(layer["class_name"]))
        number = f"_{counts[kind]}" if counts[kind] else ""
        counts[kind] += 1
        group = f"{path}layers/{kind}{number}"
        names[group] = str(layer["config"]["name"])
        names.update(_config_names(layer, f"{group}/", depth + 1))

    return names


def _snake_case(name: str) -> str:
    split = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", name))
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", split).lower()


def _natural_path(path: str) -> list[tuple[int, str]]:
    """Return a sort key that orders numbers in a path by value, so that 2 comes before 10."""
    return [(int(step), "") if step.isdecimal() else (-1, step) for step in path.split("/")]


def _unique_names(pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return paths by name, or by themselves if a name is ambiguous.

    Raises CorruptError for duplicates.
    """
    by_name = dict(pairs)
    if len(by_name) == len(pairs):
        return by_name
    by_path = {path: path for _, path in pairs}
    if len(by_path) < len(pairs):
        raise CorruptError("a weight is listed twice")
    return by_path


def _attribute_texts(group: Any, key: str) -> Iterator[str]:
    """Yield a list of strings in the attributes of a group.

    Keras splits long lists into several attributes.
    """
    if key in group.attrs:
        parts = [key]
    else:
        parts = []
        while f"{key}{len(parts)}" in group.attrs:
            parts.append(f"{key}{len(parts)}")
    for part in parts:
        yield from map(_attribute_text, group.attrs[part])


def _attribute_text(value: Any) -> str:
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


# Tensors


def _named_file(file: IndexedFile, naming: _Naming) -> IndexedFile:
    """Return `file` with its tensors under the names of `naming`.

    Raises CorruptError naming missing tensors.
    """
    missing = [path for path in naming.paths.values() if path not in file.index.rows]
    if missing:
        raise CorruptError(
            f"{listing(missing, ', ')}: listed as weights, but not in the file; use another copy"
        )

    rows: dict[str, Any] = {}
    readers: dict[str, Any] = {}
    skipped: list[str] = []
    for name, path in naming.paths.items():
        stored_dtype, shape, start = file.index.rows[path][:3]
        dtype = _dtype_of(file, path)
        if dtype is None:
            skipped.append(f"{name}: values of a type that the file does not name ({stored_dtype})")
            continue
        if dtype != stored_dtype:
            start = file.library[path].id.get_offset()
        elif path in file.readers:
            readers[name] = file.readers[path]
        rows[name] = [dtype, shape, start, "", len(rows)]

    # A value that equals a tensor's name would be read as a tie.
    metadata = {key: value for key, value in naming.metadata.items() if value not in rows}
    index = TensorIndex(rows, None, metadata, file.index.data_start)
    named = IndexedFile(file.raw, index, file.verify)
    named.readers, named.library = readers, file.library
    named.skipped = (*skipped, *_describe_others(file, naming))
    return named


def _dtype_of(file: IndexedFile, path: str) -> str | None:
    """Return torch's name of a tensor's dtype.

    Keras stores dtypes unknown to HDF5 as bytes, with or without a label.
    """
    stored_dtype = str(file.index.rows[path][0])
    if stored_dtype in ITEM_BYTES:
        return stored_dtype
    dataset = file.library[path]
    item_bytes = dataset.dtype.itemsize
    usual_label = "bfloat16" if item_bytes == 2 else ""
    label = _attribute_text(dataset.attrs.get("dtype", usual_label))
    is_bytes = dataset.dtype.kind == "V" and dataset.dtype.names is None
    if not is_bytes or dataset.id.get_offset() is None:
        return None
    return label if ITEM_BYTES.get(label) == item_bytes else None


def _describe_others(file: IndexedFile, naming: _Naming) -> Iterator[str]:
    """Yield a line for each group with tensors that do not belong to the model."""
    used = set(naming.paths.values())
    counts = Counter(path.partition("/")[0] for path in file.index.names if path not in used)
    for group, count in counts.items():
        yield f"{group}: {count} tensors that are not the model's"
