"""Base classes of the formats of tensor files.

No torch is imported before a file is opened or written.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ft_ckpt.errors import ConfigError
from ft_ckpt.formats.layout import Layout, Spec

if TYPE_CHECKING:
    from torch import Tensor

    from ft_ckpt.formats.files import RawFile, TensorFile
    from ft_ckpt.formats.index import IndexedFile
    from ft_ckpt.formats.trees import Node
    from ft_ckpt.storage import Readable
    from ft_ckpt.storage.places import Place

Ties = Mapping[str, str]  # alias of a tensor -> its stored name
Metadata = Mapping[str, str]
# (name, start, stop) -> flat elements [start, stop) of the tensor of that name
ReadRange = Callable[[str, int, int], "Tensor"]


class LaidOutObjects(ABC):
    """Stores any object for `ft_ckpt.save`, in files that are laid out before they are written."""

    dtypes: frozenset[str] = frozenset()  # of the tensors, by torch's names

    @abstractmethod
    def lay_out(
        self, root: "Node", leaves: Sequence[Spec], arrays: Sequence[int], native_floats: bool
    ) -> tuple[Layout, Sequence[str]]:
        """Lay out a file with the object `root`; return the layout and the name of each leaf in it.

        `arrays` are the indices of leaves that are numpy arrays. `native_floats` stores bfloat16 as
        a type that every reader understands. Raises SelectionError for objects that cannot be
        stored.
        """

    def write_compressed(
        self,
        path: Path,
        root: "Node",
        leaves: Sequence[Spec],
        arrays: Sequence[int],
        native_floats: bool,
        values_of: Callable[[int], Any],
    ) -> None:
        """Write a new compressed file; `values_of` returns the bytes of a leaf by its index.

        Raises ConfigError if the format has no compression.
        """
        raise ConfigError(f"{path}: this format has no compression; leave it out")


class LibraryObjects(ABC):
    """Stores and reads any object by a library, for `ft_ckpt.save` and `ft_ckpt.load`."""

    is_written = True

    def check(self, obj: Any) -> None:  # noqa: B027 - a library may restore everything
        """Raise SelectionError, naming the paths, for an object that `load` could not restore."""

    def save(self, obj: Any, path: Path) -> None:
        """Write `obj` to the new file `path`. Raises ConfigError if the format is only read."""
        raise ConfigError(f"{path}: this format is only read; choose another")

    @abstractmethod
    def load(self, file: "RawFile", map_location: Any, mapped: bool, verify: bool) -> Any:
        """Load the object in an open file; arguments as for `ft_ckpt.load`."""


class FolderWriter(ABC):
    """Writes checkpoint folders by the library of a foreign format."""

    @abstractmethod
    def check_types(self, specs: Sequence[Spec]) -> None:
        """Raise SelectionError for dtypes that the format cannot store."""

    @abstractmethod
    def write(self, folder: Path, specs: Sequence[Spec], read: ReadRange) -> None:
        """Write one checkpoint with all tensors into an empty folder."""

    @abstractmethod
    def write_shards(
        self, folder: Path, shards: Mapping[str, Sequence[Spec]], read: ReadRange
    ) -> None:
        """Write the tensors of each shard as a checkpoint of its own."""


class TensorFormat(ABC):
    """A format of tensor files. A class sets what differs and overrides what the format can do.

    Derive from `CheckpointFormat` for a format that a saver can write, from `FolderFormat` for one
    whose checkpoints are folders, and from this class for other files, with `open` or
    `open_indexed`.
    """

    name: str
    # Suffixes of its files, the first for writing. A format of folders has none.
    suffixes: tuple[str, ...] = ()
    # file names of a model's weights in a folder, without suffix; the first is used for writing
    model_stems: tuple[str, ...] = ("model",)
    # A file that is valid in another format too gets a link with this suffix, unless it is "".
    link_suffix = ""

    # whether a saver can write it; such a format is a CheckpointFormat
    serves_checkpoints = False
    # whether tensors can be converted to it
    is_written = False
    # end of an error: what to do instead of writing it
    why_read_only = ""
    # Whether a file is only a header and tensors. Then ranks can write one file together, and
    # checkpoints can share it.
    is_plain = False
    # whether a tied tensor is in the file under each of its names
    holds_aliases = False
    # whether transformers and PEFT read it
    read_by_transformers = False
    # names of the compressions that its files can have
    compressions: tuple[str, ...] = ()

    # how it stores objects; None if it stores tensors only
    objects: LaidOutObjects | LibraryObjects | None = None
    # the writer of a format whose checkpoints are folders
    folder_writer: FolderWriter | None = None

    @abstractmethod
    def recognises(self, file: "RawFile") -> bool:
        """Check whether an open file is of this format, by its content."""

    def open_indexed(self, file: "RawFile", verify: bool = False) -> "IndexedFile":
        """Open a file by its index; `verify` compares digests as tensors are read.

        Raises CorruptError for an invalid index, ConfigError if the format has none.
        """
        raise ConfigError(
            f"format {self.name!r}: its files have no index of their tensors; convert them first"
        )

    def open_file(
        self, file: "Readable", mapped: bool = True, verify: bool = False
    ) -> "IndexedFile":
        """Open a file of any store by its index; `mapped=False` copies everything that is read.

        Raises as `open_indexed` does.
        """
        from ft_ckpt.formats.files import RawFile

        return self.open_indexed(RawFile(file, mapped), verify)

    def open(self, file: "RawFile") -> "TensorFile":
        """Open the weights in a file, under their names in the model.

        Raises LoadError or CorruptError for files that cannot be read.
        """
        from ft_ckpt.formats.index import named_tensors

        return named_tensors(self.open_indexed(file))

    def open_folder(self, place: "Place") -> "TensorFile | None":
        """Open the weights in a folder, or under a prefix; None if it is not of this format."""
        return None

    def compare_sums(self, file: "RawFile") -> bool:
        """Compare an open file with its own checksums; return False if it has none.

        Raises CorruptError if one differs.
        """
        return False

    def compress_file(self, place: "Place", compression: str) -> None:
        """Replace a file of ft_ckpt by a compressed one with the same contents.

        `compression` is one of `compressions`. Raises ConfigError if the format has none.
        """
        raise ConfigError(
            f"compression {compression!r}: format {self.name!r} has none; leave it out"
        )

    def lay_out(self, specs: Sequence[Spec], metadata: Metadata, ties: Ties) -> Layout:
        """Lay out a file that contains `specs` as one flat dict.

        Raises SelectionError for tensors that the format cannot store, ConfigError if ft_ckpt does
        not write the format.
        """
        raise ConfigError(f"format {self.name!r}: ft_ckpt does not write it; choose another")

    def lay_out_file(self, specs: Sequence[Spec], metadata: Metadata, ties: Ties) -> Layout:
        """Lay out a file as `lay_out` does, and cache it: all saves of a run have equal files."""
        return _laid_out(self, tuple(specs), tuple(metadata.items()), tuple(ties.items()))


class CheckpointFormat(TensorFormat):
    """A format that a saver can write: files with an index, laid out before their first byte."""

    serves_checkpoints = True
    is_written = True

    @abstractmethod
    def open_indexed(self, file: "RawFile", verify: bool = False) -> "IndexedFile":
        """Open a file by its index; `verify` compares digests as tensors are read.

        Raises CorruptError for an invalid index.
        """

    @abstractmethod
    def lay_out(self, specs: Sequence[Spec], metadata: Metadata, ties: Ties) -> Layout:
        """Lay out a file that contains `specs` as one flat dict.

        Raises SelectionError for tensors that the format cannot store.
        """


class FolderFormat(TensorFormat):
    """A format whose checkpoints are folders, or files under a prefix in one."""

    def recognises(self, file: "RawFile") -> bool:
        return False

    @abstractmethod
    def open_folder(self, place: "Place") -> "TensorFile | None":
        """Open the weights in a folder, or under a prefix; None if it is not of this format."""


@lru_cache(maxsize=4)  # 0.1 s for the 300 tensors of an HDF5 file
def _laid_out(
    tensor_format: TensorFormat,
    specs: tuple[Spec, ...],
    metadata: tuple[tuple[str, str], ...],
    ties: tuple[tuple[str, str], ...],
) -> Layout:
    return tensor_format.lay_out(specs, dict(metadata), dict(ties))
