"""The formats `h5`, `dual` and `keras`. What reads and writes them is imported on use."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ft_ckpt.formats import ITEM_BYTES, CheckpointFormat, LaidOutObjects, Layout, Spec, TensorFormat
from ft_ckpt.formats.safetensors import NAMES

if TYPE_CHECKING:
    from ft_ckpt.formats.files import RawFile, TensorFile
    from ft_ckpt.formats.index import IndexedFile
    from ft_ckpt.formats.trees import Node
    from ft_ckpt.storage.places import Place


class _Hdf5Objects(LaidOutObjects):
    dtypes = frozenset(ITEM_BYTES)

    def lay_out(
        self, root: "Node", leaves: Sequence[Spec], arrays: Sequence[int], native_floats: bool
    ) -> tuple[Layout, Sequence[str]]:
        from ft_ckpt.extensions.hdf5.hdf5_layout import lay_out_hdf5_tree

        return lay_out_hdf5_tree(root, leaves, arrays, native_floats)

    def write_compressed(
        self,
        path: Path,
        root: "Node",
        leaves: Sequence[Spec],
        arrays: Sequence[int],
        native_floats: bool,
        values_of: Callable[[int], Any],
    ) -> None:
        from ft_ckpt.extensions.hdf5.hdf5_compressed import write_compressed

        write_compressed(path, root, leaves, arrays, native_floats, values_of)


class Hdf5(CheckpointFormat):
    """HDF5 files of ft_ckpt, which are Cerebras checkpoints; those of other programs are read."""

    name = "h5"
    suffixes = (".h5", ".hdf5", ".mdl")
    model_stems = ("model", "tf_model")
    holds_aliases = True
    compressions = ("gzip",)
    objects = _Hdf5Objects()

    def recognises(self, file: "RawFile") -> bool:
        from ft_ckpt.extensions.hdf5.hdf5 import is_hdf5

        return is_hdf5(file)

    def open_indexed(self, file: "RawFile", verify: bool = False) -> "IndexedFile":
        from ft_ckpt.extensions.hdf5.hdf5 import open_hdf5

        return open_hdf5(file, verify)

    def open(self, file: "RawFile") -> "TensorFile":
        """Open the weights in a file; those of a Keras model under their names in it."""
        from ft_ckpt.extensions.hdf5.keras import open_hdf5_weights

        return open_hdf5_weights(file)

    def lay_out(
        self, specs: Sequence[Spec], metadata: Mapping[str, str], ties: Mapping[str, str]
    ) -> Layout:
        from ft_ckpt.extensions.hdf5.hdf5_layout import lay_out_hdf5

        return lay_out_hdf5(specs, metadata, ties)

    def compress_file(self, place: "Place", compression: str) -> None:
        from ft_ckpt.extensions.tools import compress_file

        compress_file(place, compression)


class _DualObjects(LaidOutObjects):
    dtypes = frozenset(NAMES)

    def lay_out(
        self, root: "Node", leaves: Sequence[Spec], arrays: Sequence[int], native_floats: bool
    ) -> tuple[Layout, Sequence[str]]:
        from ft_ckpt.extensions.hdf5.dual import lay_out_dual_tree

        return lay_out_dual_tree(root, leaves, arrays, native_floats)


class Dual(CheckpointFormat):
    """Files that are valid safetensors and valid HDF5 at once."""

    name = "dual"
    suffixes = (".safetensors",)
    link_suffix = ".h5"
    read_by_transformers = True
    objects = _DualObjects()

    def recognises(self, file: "RawFile") -> bool:
        from ft_ckpt.extensions.hdf5.dual import is_dual

        return is_dual(file)

    def open_indexed(self, file: "RawFile", verify: bool = False) -> "IndexedFile":
        """Open a file by its HDF5 index, which is compared with the safetensors header."""
        from ft_ckpt.formats.safetensors import open_safetensors

        return open_safetensors(file, verify)

    def lay_out(
        self, specs: Sequence[Spec], metadata: Mapping[str, str], ties: Mapping[str, str]
    ) -> Layout:
        from ft_ckpt.extensions.hdf5.dual import lay_out_dual

        return lay_out_dual(specs, metadata, ties)


class Keras(TensorFormat):
    """Archives of Keras; its HDF5 files are of the format `h5`."""

    name = "keras"
    suffixes = (".keras",)

    def recognises(self, file: "RawFile") -> bool:
        from ft_ckpt.extensions.hdf5.keras import is_keras_archive

        return is_keras_archive(file)

    def open_indexed(self, file: "RawFile", verify: bool = False) -> "IndexedFile":
        from ft_ckpt.extensions.hdf5.keras import open_keras_archive

        return open_keras_archive(file, verify)
