"""Finds the format of a file by its content or its suffix, and opens its tensors."""

from pathlib import PurePath

from torch import Tensor

from ft_ckpt.errors import ConfigError, LoadError, damaged_input
from ft_ckpt.formats.layout import Spec, TensorFile
from ft_ckpt.formats.pytree import Node
from ft_ckpt.formats.registry import TensorFormat, tensor_formats, written_formats
from ft_ckpt.formats.tensor_file import IndexedFile, RawFile
from ft_ckpt.storage import ByteRun, Readable


def format_by_suffix(path: PurePath | str) -> TensorFormat:
    """The format to write `path` in. Raises ConfigError when none has its suffix."""
    suffix = PurePath(path).suffix
    found = [known for known in written_formats() if suffix.lower() in known.suffixes]
    if not found:
        suffixes = dict.fromkeys(suffix for known in written_formats() for suffix in known.suffixes)
        raise ConfigError(
            f"{path}: {suffix!r} is the suffix of no format; expected one of "
            f"{', '.join(suffixes)}, or format="
        )
    return found[0]


def detect_format(file: RawFile) -> TensorFormat:
    """The format of an open file, by its content. Raises LoadError for an unknown format."""
    # the more specific of two matching formats is registered later
    for known in reversed(tensor_formats()):
        if known.recognise is not None and known.recognise(file):
            return known
    head = bytes(file.bytes(0, min(16, file.size_bytes)))
    raise LoadError(
        f"{file.file.where}: begins with {head!r}; expected HDF5, safetensors or "
        "a file of torch.save"
    )


def open_tensor_file(file: Readable) -> TensorFile:
    """The tensors of a single open file, read by copying.

    Raises LoadError or CorruptError as its format does.
    """
    raw = RawFile(file)
    with damaged_input(raw.name):
        known = detect_format(raw)
        if known.open_tensors is not None:
            return known.open_tensors(raw)
        if known.open_indexed is not None:
            return TreeFile(known.open_file(raw.file, mapped=False))
    raise LoadError(
        f"{file.where}: a {known.name} file, of which ft_ckpt cannot read the "
        "tensors; convert it first"
    )


class TreeFile:
    """A file that holds an object: its tensors and arrays, their aliases, and the names of other
    values.
    """

    def __init__(self, file: IndexedFile) -> None:
        index = file.index
        self.file, self.names = file, index.names
        self.ties: dict[str, str] = {}
        self.skipped: list[str] = list(file.skipped)
        self.plain: dict[int, str] = {}  # index of a leaf: its first name
        if index.root is None:
            self.specs: dict[str, Spec] = dict(file.specs)
        else:
            self._walk_tree(index.root, "")
            self.specs = {
                name: file.specs[name]
                for name in (index.names[leaf] for leaf in sorted(self.plain))
            }
        metadata = {str(key): str(value) for key, value in index.metadata.items()}
        ties = {
            name: kept
            for name, kept in metadata.items()
            if kept in self.specs and name not in self.specs
        }
        self.ties |= ties
        self.metadata = {key: value for key, value in metadata.items() if key not in ties}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        return self.file.read(name, start, stop)

    def runs(self, name: str) -> list[ByteRun] | None:
        return self.file.runs(name)

    def close(self) -> None:
        self.file.close()

    def _walk_tree(self, node: Node, name: str) -> None:
        is_number_array = node.kind == "array" and node.value[1] is None
        if node.kind == "tensor" or is_number_array:
            leaf = int(node.value[0] if is_number_array else node.value)
            if leaf in self.plain and self.plain[leaf] != name:
                self.ties[name] = self.names[leaf]
            self.plain.setdefault(leaf, name)
        elif node.children:
            keys = [
                str(key.value) if key.kind == "value" else f"{place}"
                for place, key in enumerate(node.keys)
            ]
            for key, child in zip(
                keys or map(str, range(len(node.children))), node.children, strict=True
            ):
                self._walk_tree(child, f"{name}.{key}" if name else key)
        elif node.kind not in ("dict", "list", "tuple"):
            self.skipped.append(
                f"{name}: {type(node.value).__name__ if node.kind == 'value' else node.kind}"
            )
