"""The tensor formats, a record for each: file names, functions, capabilities. Does not import
torch.

A new format is one module with its functions and one record below; generic code uses the records.
Folders of orbax, which are only read, have none. Functions are named by module and imported at the
first call, so that settings can be checked without torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from ft_ckpt.errors import ConfigError
from ft_ckpt.formats.layout import ITEM_BYTES, Layout, Spec, TensorFile
from ft_ckpt.formats.safetensors import NAMES, lay_out_safetensors
from ft_ckpt.messages import expected_one_of
from ft_ckpt.storage import Readable

if TYPE_CHECKING:
    from torch import Tensor

    from ft_ckpt.formats.pytree import Node

    LayOutObject = Callable[
        [Node, Sequence[Spec], Sequence[int], bool], tuple[Layout, Sequence[str]]
    ]
    from ft_ckpt.extensions.foreign import TorchArchive
    from ft_ckpt.formats.tensor_file import IndexedFile, RawFile
    from ft_ckpt.storage import Place

DEFAULT_FORMAT = "safetensors"
Ties = Mapping[str, str]  # alias of a tensor -> its stored name
Metadata = Mapping[str, str]
Read = Callable[[str, int, int], "Tensor"]  # flat elements [start, stop) of the tensor of that name


@dataclass(frozen=True)
class FolderWriter:
    """Writing folders by the library of a foreign format."""

    check_types: Callable[[Sequence[Spec]], None]  # raises SelectionError for unsupported dtypes
    write_folder: Callable[[Path, Sequence[Spec], Read], None]
    write_shards: Callable[[Path, Mapping[str, Sequence[Spec]], Read], None] | None = None
    """Writes the tensors of each shard as a checkpoint of its own."""


# each save of a run lays out the same files: 0.1 s for the 300 tensors of an HDF5 file
@lru_cache(maxsize=4)
def _laid_out(
    lay_out: Callable[[Sequence[Spec], Metadata, Ties], Layout],
    specs: tuple[Spec, ...],
    metadata: tuple[tuple[str, str], ...],
    ties: tuple[tuple[str, str], ...],
) -> Layout:
    return lay_out(specs, dict(metadata), dict(ties))


@dataclass(frozen=True, kw_only=True)
class TensorFormat:
    """One tensor format. An unsupported operation is None, or has the default given here."""

    name: str
    # of its files; the first is used for writing; empty: a folder of files
    suffixes: tuple[str, ...] = ()
    model_stem: str = "model"  # file name of a model's weights in a folder
    other_stems: tuple[str, ...] = ()  # file names of weights written by other programs
    second_suffix: str = ""  # of a second name of its files, which are also valid in another format

    lay_out: Callable[[Sequence[Spec], Metadata, Ties], Layout] | None = None
    """A file of tensors as one flat dict; raises SelectionError for unsupported dtypes."""
    lay_out_object: "LayOutObject | None" = None
    """A file of any object and the names of its leaves, from (tree, leaves, indices of arrays,
    `native_floats`).
    """
    lay_out_archive: "Callable[[Sequence[Spec], Metadata, Ties], TorchArchive] | None" = None
    """A file of tensors with other bytes between them, such as checksums."""
    check_object: Callable[[Any], None] | None = None
    """Raises SelectionError, naming the paths, for an object that `load_object` could not restore.
    """
    save_object: Callable[[Any, Path], None] | None = None
    """Writes an object to a new file by a library, without a layout known beforehand."""
    write_compressed: Callable[..., None] | None = None
    """Writes an object to a new compressed file, see `hdf5_compressed.write_compressed`."""
    compress_file: "Callable[[Place, str], None] | None" = None
    """Replaces a file of ours by one with the same contents, in the given compression."""
    load_object: Callable[..., Any] | None = None
    """Loads the object that `save_object` wrote, from (open file, map_location, mapped, verify)."""
    open_folder: "Callable[[Place], TensorFile] | None" = None
    """The tensors of a folder, for a format whose checkpoints are folders."""
    folder_writer: FolderWriter | None = None
    written_by: str = ""
    """What writes a format that is only read here, as part of an error."""

    recognise: "Callable[[RawFile], bool] | None" = None
    """Whether an open file is of this format, by its content."""
    open_indexed: "Callable[[RawFile, bool], IndexedFile] | None" = None
    """Reads the index of an open file; the second argument: whether digests are compared as tensors
    are read.
    """
    open_tensors: "Callable[[RawFile], TensorFile] | None" = None
    """The tensors of an open file, for formats without an index, or with other names in the index.
    """

    object_dtypes: frozenset[str] = frozenset()  # dtypes of tensors in objects
    compressions: tuple[str, ...] = ()
    native_floats: bool = False  # can store bfloat16 as a type that every reader understands
    # only a header and tensors: ranks can write one file together, checkpoints can share it
    is_plain: bool = False
    holds_aliases: bool = False  # a tied tensor is in the file under each of its names
    read_by_transformers: bool = False  # and by PEFT

    def lay_out_file(self, specs: Sequence[Spec], metadata: Metadata, ties: Ties) -> Layout:
        """The layout of a file that contains `specs` as one flat dict.

        Raises SelectionError for tensors that the format cannot store, ConfigError if it has no
        such files.
        """
        if self.lay_out is None:
            raise ConfigError(f"format {self.name!r}: ft_ckpt does not write it; choose another")
        return _laid_out(self.lay_out, tuple(specs), tuple(metadata.items()), tuple(ties.items()))

    def open_file(self, file: Readable, mapped: bool = True, verify: bool = False) -> "IndexedFile":
        """The tensors of an open file.

        Raises CorruptError for an invalid one, ConfigError if the format has no index.
        """
        if self.open_indexed is None:
            raise ConfigError(
                f"format {self.name!r}: its files have no index of their "
                "tensors; convert them first"
            )
        return self.open_indexed(
            function_at("ft_ckpt.formats.tensor_file:RawFile")(file, mapped), verify
        )

    @property
    def serves_checkpoints(self) -> bool:
        """Whether a saver can write it: with a layout known before the first byte, and an index to
        open it by.
        """
        return self.lay_out is not None and self.open_indexed is not None

    @property
    def is_written(self) -> bool:
        """Whether tensors can be written in it; otherwise it is read-only."""
        return (
            self.lay_out is not None
            or self.lay_out_archive is not None
            or self.folder_writer is not None
        )

    @property
    def serves_objects(self) -> bool:
        """Whether it can store any object."""
        return self.lay_out_object is not None or self.save_object is not None


def function_at(place: str) -> Callable[..., Any]:
    """The function at "module:name"."""
    module, name = place.split(":")
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function


@dataclass(frozen=True)
class _Lazily:
    """The function at `place`, whose module is imported when it is first called."""

    place: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return function_at(self.place)(*args, **kwargs)


_FORMATS: dict[str, TensorFormat] = {}


def register_format(known: TensorFormat) -> None:
    """Add a format; its `recognise` is called before those of existing formats."""
    _FORMATS[known.name] = known


def tensor_formats() -> tuple[TensorFormat, ...]:
    """All formats, in the order in which messages list them and readers of a folder choose."""
    return tuple(_FORMATS.values())


def written_formats() -> list[TensorFormat]:
    """The formats that tensors can be written in, in that order."""
    return [known for known in tensor_formats() if known.is_written]


def format_named(name: str) -> TensorFormat:
    """The format called `name`. Raises ConfigError when there is none."""
    if name not in _FORMATS:
        raise ConfigError(f"format {name!r}: {expected_one_of(name, _FORMATS)}")
    return _FORMATS[name]


def checkpoint_format_of(name: str) -> TensorFormat:
    """The format of a weight file, by suffix; the default for unknown suffixes, which its reader
    rejects.
    """
    suffix = PurePosixPath(name).suffix
    found = [
        known for known in tensor_formats() if known.serves_checkpoints and suffix in known.suffixes
    ]
    return found[0] if found else format_named(DEFAULT_FORMAT)


register_format(
    TensorFormat(
        name=DEFAULT_FORMAT,
        suffixes=(".safetensors",),
        lay_out=lay_out_safetensors,
        lay_out_object=_Lazily("ft_ckpt.formats.safetensors_file:lay_out_safetensors_object"),
        recognise=_Lazily("ft_ckpt.formats.safetensors_file:is_safetensors"),
        open_indexed=_Lazily("ft_ckpt.formats.safetensors_file:open_safetensors"),
        object_dtypes=frozenset(NAMES),
        is_plain=True,
        read_by_transformers=True,
    )
)
register_format(
    TensorFormat(
        name="h5",
        suffixes=(".h5", ".hdf5", ".mdl"),
        other_stems=("tf_model",),
        lay_out=_Lazily("ft_ckpt.extensions.hdf5.hdf5_layout:lay_out_hdf5"),
        lay_out_object=_Lazily("ft_ckpt.extensions.hdf5.hdf5_layout:lay_out_hdf5_tree"),
        recognise=_Lazily("ft_ckpt.extensions.hdf5.hdf5:is_hdf5"),
        open_indexed=_Lazily("ft_ckpt.extensions.hdf5.hdf5:open_hdf5"),
        open_tensors=_Lazily("ft_ckpt.extensions.foreign.keras:open_hdf5_tensors"),
        object_dtypes=frozenset(ITEM_BYTES),
        write_compressed=_Lazily("ft_ckpt.extensions.hdf5.hdf5_compressed:write_compressed"),
        compress_file=_Lazily("ft_ckpt.extensions.tools.objects:compress_file"),
        compressions=("gzip",),
        native_floats=True,
        holds_aliases=True,
    )
)
register_format(
    TensorFormat(
        name="dual",
        suffixes=(".safetensors",),
        second_suffix=".h5",
        lay_out=_Lazily("ft_ckpt.extensions.hdf5.dual:lay_out_dual"),
        lay_out_object=_Lazily("ft_ckpt.extensions.hdf5.dual:lay_out_dual_tree"),
        recognise=_Lazily("ft_ckpt.extensions.hdf5.dual:is_dual"),
        open_indexed=_Lazily(
            "ft_ckpt.formats.safetensors_file:open_safetensors"
        ),  # which compares its two tables
        object_dtypes=frozenset(NAMES),
        native_floats=True,
        read_by_transformers=True,
    )
)
register_format(
    TensorFormat(
        name="torch",
        suffixes=(".bin", ".pt", ".pth"),
        model_stem="pytorch_model",
        lay_out_archive=_Lazily("ft_ckpt.extensions.foreign.torch_file:lay_out_torch"),
        check_object=_Lazily("ft_ckpt.extensions.foreign.torch_file:check_torch_object"),
        save_object=_Lazily("ft_ckpt.extensions.foreign.torch_file:save_torch_object"),
        load_object=_Lazily("ft_ckpt.extensions.foreign.torch_file:load_torch_object"),
        recognise=_Lazily("ft_ckpt.extensions.foreign.torch_file:is_torch_file"),
        open_tensors=_Lazily("ft_ckpt.extensions.foreign.torch_file:open_torch_file"),
    )
)
register_format(
    TensorFormat(
        name="lightning",
        suffixes=(".ckpt",),
        load_object=_Lazily("ft_ckpt.extensions.foreign.lightning:load_lightning"),
        recognise=_Lazily("ft_ckpt.extensions.foreign.lightning:is_lightning"),
        open_tensors=_Lazily("ft_ckpt.extensions.foreign.lightning:open_lightning"),
    )
)
register_format(
    TensorFormat(
        name="keras",
        suffixes=(".keras",),
        recognise=_Lazily("ft_ckpt.extensions.foreign.keras:is_keras_archive"),
        open_indexed=_Lazily("ft_ckpt.extensions.foreign.keras:open_keras_archive"),
    )
)
register_format(
    TensorFormat(
        name="flax",
        suffixes=(".msgpack",),
        model_stem="flax_model",
        recognise=_Lazily("ft_ckpt.extensions.foreign.jax:is_flax"),
        open_indexed=_Lazily("ft_ckpt.extensions.foreign.jax:open_flax"),
    )
)
register_format(
    TensorFormat(
        name="tensorflow",
        open_folder=_Lazily("ft_ckpt.extensions.foreign.tensorflow:open_tensorflow"),
        folder_writer=FolderWriter(
            _Lazily("ft_ckpt.extensions.foreign.tensorflow:check_tensorflow_types"),
            _Lazily("ft_ckpt.extensions.foreign.tensorflow:write_tensorflow"),
            _Lazily("ft_ckpt.extensions.foreign.tensorflow:write_tensorflow_shards"),
        ),
    )
)
register_format(
    TensorFormat(
        name="dcp",
        open_folder=_Lazily("ft_ckpt.extensions.foreign.dcp:open_dcp"),
        written_by=(
            "folders of torch.distributed.checkpoint are read only: convert to a torch file (.pt), "
            "which torch.distributed.checkpoint.format_utils.torch_save_to_dcp makes one of"
        ),
    )
)
