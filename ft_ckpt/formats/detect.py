"""Which format a file is of, told by its first bytes, and how it is opened."""

from contextlib import closing
from pathlib import Path

from torch import Tensor

from ft_ckpt.errors import ConfigError, LoadError, damaged_input
from ft_ckpt.formats import safetensors_file, torch_file
from ft_ckpt.formats.hdf5 import hdf5_file
from ft_ckpt.formats.layout import Spec, TensorFile
from ft_ckpt.formats.mapped_file import RawFile
from ft_ckpt.formats.pytree import Node
from ft_ckpt.formats.tensor_file import IndexedFile
from ft_ckpt.storage.buffers import ByteRun

SUFFIXES = {
    **dict.fromkeys((".h5", ".hdf5", ".mdl"), "h5"),
    ".safetensors": "safetensors",
    **dict.fromkeys((".pt", ".bin", ".pth"), "torch"),
}
_LEAST_USER_BLOCK, _MOST_USER_BLOCK = 512, 1 << 30


def format_by_name(path: Path, given: str | None) -> str:
    """The format to write `path` in: the one `given`, or that of its suffix. Raises ConfigError when there is none."""
    if given is not None:
        return given
    found = SUFFIXES.get(path.suffix.lower())
    if found is None:
        raise ConfigError(f"{path}: no format goes by {path.suffix!r}; use {', '.join(SUFFIXES)}, or give a format")
    return found


def detect_format(path: Path) -> str:
    """ "h5", "dual", "safetensors" or "torch", by content. Raises LoadError when it is none of them."""
    with closing(RawFile(path)) as file:
        head = bytes(file.bytes(0, min(16, file.size_bytes)))
        if head.startswith(hdf5_file.SIGNATURE):
            return "h5"
        if head.startswith(b"PK\3\4") or (head[:1] == b"\x80" and head[8:9] != b"{"):  # a length can begin so too
            return "torch"
        at = _LEAST_USER_BLOCK
        while at + len(hdf5_file.SIGNATURE) <= min(file.size_bytes, _MOST_USER_BLOCK):
            if file.bytes(at, len(hdf5_file.SIGNATURE)) == hdf5_file.SIGNATURE:
                return "dual" if head[8:9] == b"{" else "h5"
            at *= 2
    if head[8:9] == b"{":
        return "safetensors"
    raise LoadError(f"{path}: begins with {head!r}; expected HDF5, safetensors or a file of torch.save")


def open_tensor_file(path: Path) -> TensorFile:
    """The tensors of a single file, read by copying. Raises LoadError or CorruptError as its format does."""
    with damaged_input(path.name):
        kind = detect_format(path)
        if kind == "torch":
            return torch_file.open_torch_file(path)
        opened = (
            hdf5_file.open_hdf5(path, mapped=False)
            if kind == "h5"
            else safetensors_file.open_safetensors(path, mapped=False)
        )
        return TreeFile(opened)


class TreeFile:
    """A file that holds an object: its tensors and arrays, further names of them, and names of everything else."""

    def __init__(self, file: IndexedFile) -> None:
        index = file.index
        self.file, self.names = file, index.names
        self.ties: dict[str, str] = {}
        self.skipped: list[str] = []
        self.plain: dict[int, str] = {}  # leaf: the name it was found under first
        if index.root is None:
            self.specs: dict[str, Spec] = dict(file.specs)
        else:
            self._walk_tree(index.root, "")
            self.specs = {name: file.specs[name] for name in (index.names[leaf] for leaf in sorted(self.plain))}
        metadata = {str(key): str(value) for key, value in index.metadata.items()}
        told = {name: kept for name, kept in metadata.items() if kept in self.specs and name not in self.specs}
        self.ties |= told
        self.metadata = {key: value for key, value in metadata.items() if key not in told}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Flat elements [start, stop) of tensor `name`: 1-D, on the CPU."""
        return self.file.read(name, start, stop)

    def runs(self, name: str) -> list[ByteRun] | None:
        """Where the bytes of tensor `name` lie; None when it is not stored in one piece."""
        return self.file.runs(name)

    def close(self) -> None:
        """Let go of the file."""
        self.file.close()

    def _walk_tree(self, node: Node, name: str) -> None:
        leaf = _stored_leaf(node)
        if leaf is not None:
            if leaf in self.plain and self.plain[leaf] != name:
                self.ties[name] = self.names[leaf]
            self.plain.setdefault(leaf, name)
        elif node.children:
            keys = [str(key.value) if key.kind == "value" else f"{place}" for place, key in enumerate(node.keys)]
            for key, child in zip(keys or map(str, range(len(node.children))), node.children, strict=True):
                self._walk_tree(child, f"{name}.{key}" if name else key)
        elif node.kind not in ("dict", "list", "tuple"):
            self.skipped.append(f"{name}: {type(node.value).__name__ if node.kind == 'value' else node.kind}")


def _stored_leaf(node: Node) -> int | None:
    """The leaf of a tensor, or of an array that is stored as numbers."""
    if node.kind == "tensor":
        return int(node.value)
    return int(node.value[0]) if node.kind == "array" and node.value[1] is None else None
