"""Plans and writes the weight files of a conversion."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

from ft_ckpt.errors import SelectionError, listing
from ft_ckpt.extensions.tools.converting.copy_check import read_slices
from ft_ckpt.formats import FilePlan, Layout, Spec, TensorFormat, write_file
from ft_ckpt.formats.files import TensorFile
from ft_ckpt.progress_bars import track_bytes
from ft_ckpt.storage import Store
from ft_ckpt.storage.digests import FileRecord
from ft_ckpt.storage.io import ByteRun, Region, WriterPool, read_ahead

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Output:
    """One planned weight file, and the tensors that go into it."""

    plan: FilePlan
    file: TensorFile

    def regions(self) -> Iterator[Region]:
        """Yield the bytes of the tensors, in the order of the plan."""
        return _tensor_regions(self.file, self.plan.layout)


def plan_output(target_format: TensorFormat, path: str, file: TensorFile) -> Output:
    """Plan the file `path` with the tensors of `file`.

    Raises SelectionError naming tensors whose dtypes or names the format cannot store.
    """
    # transformers refuses files without "format" in their metadata
    metadata = {"format": "pt", **file.metadata}
    layout = target_format.lay_out_file(list(file.specs.values()), metadata, file.ties)
    changed_names = sorted(file.specs.keys() - {spec.name for spec in layout.specs})
    if changed_names:
        names = [repr(name) for name in changed_names]
        raise SelectionError(
            f"{listing(names)}: not a name for format {target_format.name!r}; rename it"
        )
    return Output(FilePlan(path, layout), file)


def write_outputs(outputs: Sequence[Output], store: Store, progress: bool) -> list[FileRecord]:
    """Write `outputs` durably into `store`, with a progress bar on a terminal if `progress`."""
    total_bytes = sum(output.plan.layout.size_bytes for output in outputs)
    with (
        track_bytes(total_bytes if progress else 0, "converting") as advance,
        WriterPool(advance=advance) as writer,
    ):
        records = []
        for output in outputs:
            plan = output.plan
            new_file = store.create(plan.path, plan.layout.size_bytes)
            records.append(write_file(plan, output.regions(), new_file, writer))
        return records


class _Piece(NamedTuple):
    """The next bytes of a tensor, on the host. `memory_owner` keeps the memory allocated."""

    name: str
    address: int
    size_bytes: int
    memory_owner: Any


def _tensor_regions(file: TensorFile, layout: Layout) -> Iterator[Region]:
    """Yield the bytes of the tensors, in the order of the layout.

    The stored bytes of tensors that do not change are copied in blocks. Other tensors are read
    slice by slice.
    """
    starts = {spec.name: start for spec, start in zip(layout.specs, layout.starts, strict=True)}
    runs = {spec.name: file.runs(spec.name) for spec in layout.specs}
    for is_copied, group in groupby(layout.specs, lambda spec: runs[spec.name] is not None):
        specs = list(group)
        pieces = _copied_pieces(specs, runs) if is_copied else _read_pieces(file, specs)
        for piece in pieces:
            start = starts[piece.name]
            yield Region(start, piece.address, piece.size_bytes, piece.memory_owner)
            starts[piece.name] += piece.size_bytes


def _copied_pieces(
    specs: Sequence[Spec], runs: Mapping[str, Sequence[ByteRun] | None]
) -> Iterator[_Piece]:
    named_runs = []
    for spec in specs:
        for run in runs[spec.name] or ():
            named_runs.append(replace(run, name=spec.name))
    for block in read_ahead(named_runs):
        yield _Piece(block.run.name, block.address, block.size_bytes, block)


def _read_pieces(file: TensorFile, specs: Sequence[Spec]) -> Iterator[_Piece]:
    for spec, data in _prefetched(read_slices(file, specs)):
        yield _Piece(spec.name, data.data_ptr(), data.nbytes, data)


def _prefetched(items: Iterable[_Item]) -> Iterator[_Item]:
    """Yield `items`, of which a thread prepares the next one while the caller uses one.

    So reading and writing overlap.
    """
    iterator = iter(items)
    end = object()
    with ThreadPoolExecutor(1, "ft_ckpt-read") as reader:
        next_item: Future[Any] = reader.submit(next, iterator, end)
        while True:
            item = next_item.result()
            if item is end:
                return
            next_item = reader.submit(next, iterator, end)
            yield item
