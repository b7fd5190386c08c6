"""Open files whose tensors are runs of bytes, read a slice at a time. Most foreign formats come down to this."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ft_ckpt.formats.layout import ITEM_BYTES, Spec
from ft_ckpt.formats.raw_file import RawFile
from ft_ckpt.formats.zip_records import ZipRecord
from ft_ckpt.storage.read_ahead import ByteRun


@dataclass(frozen=True, eq=False)
class Span:
    """The next elements of a tensor, in one file."""

    file: RawFile
    start: int  # byte of the first
    numel: int
    record: ZipRecord | None = None  # of a zip file, whose checksum is compared as they are read

    def read(self, first: int, count: int, dtype: torch.dtype) -> Tensor:
        """Elements [first, first + count). Raises CorruptError when the file has changed, or its checksum differs."""
        start = self.start + first * dtype.itemsize
        data = self.file.tensor(start, count, dtype)
        if self.record is not None and count:
            self.record.take(self.start + self.numel * dtype.itemsize, start, data.view(torch.uint8).numpy())
        return data

    def run(self, name: str, item_bytes: int) -> ByteRun:
        """Its bytes."""
        stop = self.start + self.numel * item_bytes
        watch = None if self.record is None else partial(self.record.take, stop)
        return ByteRun(name, self.file.file, self.start, stop - self.start, watch)


class SpanFile:
    """Tensors each made of spans that follow one another."""

    def __init__(
        self,
        specs: Mapping[str, Spec],
        spans: Mapping[str, Sequence[Span]],
        *,
        ties: Mapping[str, str] | None = None,
        skipped: Sequence[str] = (),
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.specs, self.spans = specs, spans
        self.ties = dict(ties or {})  # further name of a tensor: the one it is kept under
        self.skipped = tuple(skipped)  # "name: what it is" of what is no tensor
        self.metadata = dict(metadata or {})

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Flat elements [start, stop) of tensor `name`: 1-D, on the CPU, of a copy or of the file's own pages.

        Raises CorruptError when a file has changed since it was opened.
        """
        spec = self.specs[name]
        dtype = getattr(torch, spec.dtype)
        stop, begin, parts = spec.numel if stop is None else stop, 0, []
        for span in self.spans[name]:
            low, high = max(start, begin), min(stop, begin + span.numel)
            if low < high:
                parts.append(span.read(low - begin, high - low, dtype))
            begin += span.numel
        if not parts:
            return torch.empty(0, dtype=dtype)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def runs(self, name: str) -> list[ByteRun] | None:
        """The byte ranges of tensor `name` in its files."""
        return [span.run(name, ITEM_BYTES[self.specs[name].dtype]) for span in self.spans[name]]

    def close(self) -> None:
        """Close the files. Tensors that were read stay valid."""
        for spans in self.spans.values():
            for span in spans:
                span.file.close()
