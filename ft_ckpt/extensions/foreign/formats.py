"""Formats of other programs. What reads and writes them is imported on use."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ft_ckpt.formats import FolderFormat, FolderWriter, Layout, LibraryObjects, Spec, TensorFormat

if TYPE_CHECKING:
    from ft_ckpt.formats import ReadRange
    from ft_ckpt.formats.files import RawFile, TensorFile
    from ft_ckpt.formats.index import IndexedFile
    from ft_ckpt.storage.places import Place


class _TorchObjects(LibraryObjects):
    def check(self, obj: Any) -> None:
        from ft_ckpt.extensions.foreign.torch_files import check_torch_object

        check_torch_object(obj)

    def save(self, obj: Any, path: Path) -> None:
        from ft_ckpt.extensions.foreign.torch_files import save_torch_object

        save_torch_object(obj, path)

    def load(self, file: "RawFile", map_location: Any, mapped: bool, verify: bool) -> Any:
        from ft_ckpt.extensions.foreign.torch_files import load_torch_object

        return load_torch_object(file, map_location, mapped, verify)


class Torch(TensorFormat):
    """Files of `torch.save`."""

    name = "torch"
    suffixes = (".bin", ".pt", ".pth")
    model_stems = ("pytorch_model",)
    is_written = True
    objects = _TorchObjects()

    def recognises(self, file: "RawFile") -> bool:
        from ft_ckpt.extensions.foreign.torch_files import is_torch_file

        return is_torch_file(file)

    def open(self, file: "RawFile") -> "TensorFile":
        from ft_ckpt.extensions.foreign.torch_files import open_torch_file

        return open_torch_file(file)

    def compare_sums(self, file: "RawFile") -> bool:
        from ft_ckpt.extensions.foreign.torch_files import compare_sums

        return compare_sums(file)

    def lay_out(
        self, specs: Sequence[Spec], metadata: Mapping[str, str], ties: Mapping[str, str]
    ) -> Layout:
        from ft_ckpt.extensions.foreign.torch_files import lay_out_torch

        return lay_out_torch(specs, ties)


class _LightningObjects(LibraryObjects):
    is_written = False

    def load(self, file: "RawFile", map_location: Any, mapped: bool, verify: bool) -> Any:
        from ft_ckpt.extensions.foreign.lightning import load_lightning

        return load_lightning(file, map_location, mapped, verify)


class Lightning(TensorFormat):
    """Checkpoints of Lightning: files, and sharded ones, which are folders of DCP."""

    name = "lightning"
    suffixes = (".ckpt",)
    objects = _LightningObjects()

    def recognises(self, file: "RawFile") -> bool:
        from ft_ckpt.extensions.foreign.lightning import is_lightning

        return is_lightning(file)

    def open(self, file: "RawFile") -> "TensorFile":
        from ft_ckpt.extensions.foreign.lightning import open_lightning

        return open_lightning(file)

    def open_folder(self, place: "Place") -> "TensorFile | None":
        from ft_ckpt.extensions.foreign.lightning import open_lightning_folder

        return open_lightning_folder(place)


class Flax(TensorFormat):
    """MessagePack files of flax."""

    name = "flax"
    suffixes = (".msgpack",)
    model_stems = ("flax_model",)

    def recognises(self, file: "RawFile") -> bool:
        from ft_ckpt.extensions.foreign.flax import is_flax

        return is_flax(file)

    def open_indexed(self, file: "RawFile", verify: bool = False) -> "IndexedFile":
        from ft_ckpt.extensions.foreign.flax import open_flax

        return open_flax(file, verify)


class _TensorFlowWriter(FolderWriter):
    def check_types(self, specs: Sequence[Spec]) -> None:
        from ft_ckpt.extensions.foreign.tensorflow import check_tensorflow_types

        check_tensorflow_types(specs)

    def write(self, folder: Path, specs: Sequence[Spec], read: "ReadRange") -> None:
        from ft_ckpt.extensions.foreign.tensorflow import write_tensorflow

        write_tensorflow(folder, specs, read)

    def write_shards(
        self, folder: Path, shards: Mapping[str, Sequence[Spec]], read: "ReadRange"
    ) -> None:
        from ft_ckpt.extensions.foreign.tensorflow import write_tensorflow_shards

        write_tensorflow_shards(folder, shards, read)


class TensorFlow(FolderFormat):
    """Checkpoints of TensorFlow 2: several files under a prefix, in a folder."""

    name = "tensorflow"
    is_written = True
    folder_writer = _TensorFlowWriter()

    def open_folder(self, place: "Place") -> "TensorFile | None":
        from ft_ckpt.extensions.foreign.tensorflow import bundle_prefixes, open_tensorflow

        return open_tensorflow(place) if bundle_prefixes(place) else None


class Orbax(FolderFormat):
    """Folders of orbax."""

    name = "orbax"

    def open_folder(self, place: "Place") -> "TensorFile | None":
        from ft_ckpt.extensions.foreign.orbax import open_orbax, orbax_folder

        tree = orbax_folder(place)
        return None if tree is None else open_orbax(tree)


class Dcp(FolderFormat):
    """Folders of torch.distributed.checkpoint."""

    name = "dcp"
    why_read_only = (
        "folders of torch.distributed.checkpoint are read only: convert to a torch file (.pt), "
        "which torch.distributed.checkpoint.format_utils.torch_save_to_dcp makes one of"
    )

    def open_folder(self, place: "Place") -> "TensorFile | None":
        from ft_ckpt.extensions.foreign.dcp import METADATA, open_dcp

        return open_dcp(place) if place.folder.stat(METADATA) is not None else None
