"""A small format, as a distribution of other people would bring it."""

import json
from collections.abc import Mapping, Sequence

from ft_ckpt.formats import CheckpointFormat, Layout, Spec
from ft_ckpt.formats.files import RawFile
from ft_ckpt.formats.index import IndexedFile, TensorIndex

MAGIC = b"tiny"


class Tiny(CheckpointFormat):
    """Four letters, the length of a table of the tensors, that table, and the tensors one after the
    other.
    """

    name = "tiny"
    suffixes = (".tiny",)

    def recognises(self, file: RawFile) -> bool:
        return bytes(file.bytes(0, 4)) == MAGIC

    def lay_out(
        self, specs: Sequence[Spec], metadata: Mapping[str, str], ties: Mapping[str, str]
    ) -> Layout:
        starts, at = [], 0
        for spec in specs:
            starts.append(at)
            at += spec.size_bytes
        table = [
            [spec.name, spec.dtype, spec.shape, start]
            for spec, start in zip(specs, starts, strict=True)
        ]
        text = json.dumps(table).encode()
        header = MAGIC + len(text).to_bytes(8, "little") + text
        return Layout(
            header, tuple(specs), tuple(len(header) + start for start in starts), len(header) + at
        )

    def open_indexed(self, file: RawFile, verify: bool = False) -> IndexedFile:
        size = int.from_bytes(file.bytes(4, 8), "little")
        table = json.loads(file.bytes(12, size))
        rows = {
            name: [dtype, shape, start, "", leaf]
            for leaf, (name, dtype, shape, start) in enumerate(table)
        }
        return IndexedFile(file, TensorIndex(rows, None, {}, 12 + size), verify)
