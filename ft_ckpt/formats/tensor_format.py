"""What a format of tensor files is to the rest of ft_ckpt.

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
ReadRange = Callable[
    [str, int, int], "Tensor"
]  # flat elements [start, stop) of the tensor of that name


class LaidOutObjects(ABC):
    """How `ft_ckpt.save` stores any object in files whose layout is known beforehand."""

    dtypes: frozenset[str] = frozenset()  # of the tensors, by torch's names

    @abstractmethod
    def lay_out(
        self, root: "Node", leaves: Sequence[Spec], arrays: Sequence[int], native_floats: bool
    ) -> tuple[Layout, Sequence[str]]:
        """The layout of a file with the object `root`, and the name of each leaf in it.

        `arrays`: the indices of leaves that are numpy arrays; `native_floats`: store bfloat16 as a
        type that every reader understands. Raises SelectionError for what cannot be stored.
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
        """Write a new compressed file; `values_of` gives the bytes of a leaf by its index."""
        raise ConfigError(f"{path}: this format has no compression; leave it out")


class LibraryObjects(ABC):
    """How a library stores any object in a file, and reads it."""

    is_written = True

    def check(self, obj: Any) -> None:  # noqa: B027 - a library may restore everything
        """Raise SelectionError, naming the paths, for an object that `load` could not restore."""

    def save(self, obj: Any, path: Path) -> None:
        """Write `obj` to the new file `path`."""
        raise ConfigError(f"{path}: this format is only read; choose another")

    @abstractmethod
    def load(self, file: "RawFile", map_location: Any, mapped: bool, verify: bool) -> Any:
        """The object in an open file; arguments as for `ft_ckpt.load`."""


class FolderWriter(ABC):
    """Writing folders by the library of a foreign format."""

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


class TensorFormat:
    """One format. A class sets what differs and overrides what the format can do.

    A format that checkpoints can be saved in has `open_indexed`, `recognises` and `lay_out`.
    """

    name: str
    # of its files; the first is used for writing; empty: a folder of files
    suffixes: tuple[str, ...] = ()
    # file names of a model's weights in a folder, without suffix; the first is used for writing
    model_stems: tuple[str, ...] = ("model",)
    # of a link to each of its files, which is valid in another format too; empty: none
    link_suffix = ""

    serves_checkpoints = False  # a saver can write it
    is_written = False  # tensors can be converted to it
    why_read_only = ""  # what to do instead of writing it, as the end of an error
    # only a header and tensors: ranks can write one file together, checkpoints can share it
    is_plain = False
    holds_aliases = False  # a tied tensor is in the file under each of its names
    read_by_transformers = False  # and by PEFT
    compressions: tuple[str, ...] = ()  # of its files

    objects: LaidOutObjects | LibraryObjects | None = None  # None: tensors only
    folder_writer: FolderWriter | None = None  # for a format whose checkpoints are folders

    def recognises(self, file: "RawFile") -> bool:
        """Whether an open file is of this format, by its content."""
        return False

    def open_indexed(self, file: "RawFile", verify: bool = False) -> "IndexedFile":
        """An open file by its index; `verify`: compare digests as tensors are read.

        Raises CorruptError for an invalid one, ConfigError if the format has no index.
        """
        raise ConfigError(
            f"format {self.name!r}: its files have no index of their tensors; convert them first"
        )

    def open_file(
        self, file: "Readable", mapped: bool = True, verify: bool = False
    ) -> "IndexedFile":
        """As `open_indexed`, for bytes that are open; `mapped=False` copies all that is read."""
        from ft_ckpt.formats.files import RawFile

        return self.open_indexed(RawFile(file, mapped), verify)

    def open(self, file: "RawFile") -> "TensorFile":
        """The weights in an open file, under their names in the model.

        Raises LoadError or CorruptError for files that it cannot read.
        """
        from ft_ckpt.formats.index import named_tensors

        return named_tensors(self.open_indexed(file))

    def open_folder(self, place: "Place") -> "TensorFile | None":
        """The weights in a folder, or under a prefix; None if it is not of this format."""
        return None

    def compare_sums(self, file: "RawFile") -> bool:
        """Compare an open file with its own checksums; False if it has none.

        Raises CorruptError where one differs.
        """
        return False

    def compress_file(self, place: "Place", compression: str) -> None:
        """Replace a file of ft_ckpt by one with the same contents in one of `compressions`.

        Raises ConfigError if the format has none.
        """
        raise ConfigError(
            f"compression {compression!r}: format {self.name!r} has none; leave it out"
        )

    def lay_out(self, specs: Sequence[Spec], metadata: Metadata, ties: Ties) -> Layout:
        """The layout of a file that contains `specs` as one flat dict.

        Raises SelectionError for tensors that the format cannot store, ConfigError if it has no
        such files.
        """
        raise ConfigError(f"format {self.name!r}: ft_ckpt does not write it; choose another")

    def lay_out_file(self, specs: Sequence[Spec], metadata: Metadata, ties: Ties) -> Layout:
        """As `lay_out`; the last layouts are kept, since all saves of a run have the same files."""
        return _laid_out(self, tuple(specs), tuple(metadata.items()), tuple(ties.items()))


@lru_cache(maxsize=4)  # 0.1 s for the 300 tensors of an HDF5 file
def _laid_out(
    tensor_format: TensorFormat,
    specs: tuple[Spec, ...],
    metadata: tuple[tuple[str, str], ...],
    ties: tuple[tuple[str, str], ...],
) -> Layout:
    return tensor_format.lay_out(specs, dict(metadata), dict(ties))
