"""Open files whose tensors are runs of bytes, read a slice at a time. Most foreign formats come down to this."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ft_ckpt.formats.layout import ITEM_BYTES, Spec
from ft_ckpt.formats.raw_file import RawFile
from ft_ckpt.storage.read_ahead import ByteRun


@dataclass(frozen=True, eq=False)
class Span:
    """The next elements of a tensor, in one file."""

    file: RawFile
    start: int  # byte of the first
    numel: int


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
        chosen = _overlapping_spans(self.spans[name], start, spec.numel if stop is None else stop, dtype.itemsize)
        parts = [span.file.tensor(span.start, span.numel, dtype) for span in chosen]
        if not parts:
            return torch.empty(0, dtype=dtype)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def runs(self, name: str) -> list[ByteRun] | None:
        """The byte ranges of tensor `name` in its files."""
        item_bytes = ITEM_BYTES[self.specs[name].dtype]
        return [ByteRun(name, span.file.file, span.start, span.numel * item_bytes) for span in self.spans[name]]

    def close(self) -> None:
        """Close the files. Tensors that were read stay valid."""
        for spans in self.spans.values():
            for span in spans:
                span.file.close()


def _overlapping_spans(spans: Sequence[Span], start: int, stop: int, item_bytes: int) -> Iterator[Span]:
    """The spans of elements [start, stop)."""
    begin = 0
    for span in spans:
        low, high = max(start, begin), min(stop, begin + span.numel)
        if low < high:
            yield Span(span.file, span.start + (low - begin) * item_bytes, high - low)
        begin += span.numel
