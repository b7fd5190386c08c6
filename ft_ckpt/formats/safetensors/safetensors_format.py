"""The format `safetensors`."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ft_ckpt.formats.layout import Layout, Spec
from ft_ckpt.formats.safetensors.header import NAMES, lay_out_safetensors
from ft_ckpt.formats.tensor_format import CheckpointFormat, LaidOutObjects

if TYPE_CHECKING:
    from ft_ckpt.formats.files import RawFile
    from ft_ckpt.formats.index import IndexedFile
    from ft_ckpt.formats.trees import Node


class _SafetensorsObjects(LaidOutObjects):
    dtypes = frozenset(NAMES)

    def lay_out(
        self, root: "Node", leaves: Sequence[Spec], arrays: Sequence[int], native_floats: bool
    ) -> tuple[Layout, Sequence[str]]:
        from ft_ckpt.formats.safetensors.safetensors_file import lay_out_safetensors_object

        return lay_out_safetensors_object(root, leaves)


class Safetensors(CheckpointFormat):
    """Files of the safetensors library."""

    name = "safetensors"
    suffixes = (".safetensors",)
    is_plain = read_by_transformers = True
    objects = _SafetensorsObjects()

    def recognises(self, file: "RawFile") -> bool:
        from ft_ckpt.formats.safetensors.safetensors_file import is_safetensors

        return is_safetensors(file)

    def open_indexed(self, file: "RawFile", verify: bool = False) -> "IndexedFile":
        from ft_ckpt.formats.safetensors.safetensors_file import open_safetensors

        return open_safetensors(file, verify)

    def lay_out(
        self, specs: Sequence[Spec], metadata: Mapping[str, str], ties: Mapping[str, str]
    ) -> Layout:
        return lay_out_safetensors(specs, metadata, ties)
