"""A small format, as another distribution would bring it."""

import json
from collections.abc import Mapping, Sequence

from ft_ckpt.formats import CheckpointFormat, Layout, Spec
from ft_ckpt.formats.files import RawFile
from ft_ckpt.formats.index import IndexedFile, TensorIndex

MAGIC = b"tiny"


class Tiny(CheckpointFormat):
    """Four letters, the length of a table of the tensors, that table, and the tensors."""

    name = "tiny"
    suffixes = (".tiny",)

    def recognises(self, file: RawFile) -> bool:
        return bytes(file.bytes(0, 4)) == MAGIC

    def lay_out(
        self, specs: Sequence[Spec], metadata: Mapping[str, str], ties: Mapping[str, str]
    ) -> Layout:
        table, starts, size_bytes = [], [], 0
        for spec in specs:
            table.append([spec.name, spec.dtype, spec.shape, size_bytes])
            starts.append(size_bytes)
            size_bytes += spec.size_bytes
        text = json.dumps(table).encode()
        header = MAGIC + len(text).to_bytes(8, "little") + text
        offsets = tuple(len(header) + start for start in starts)
        return Layout(header, tuple(specs), offsets, len(header) + size_bytes)

    def open_indexed(self, file: RawFile, verify: bool = False) -> IndexedFile:
        size = int.from_bytes(file.bytes(4, 8), "little")
        rows = {}
        for leaf, (name, dtype, shape, start) in enumerate(json.loads(file.bytes(12, size))):
            rows[name] = [dtype, shape, start, "", leaf]
        return IndexedFile(file, TensorIndex(rows, None, {}, 12 + size), verify)
