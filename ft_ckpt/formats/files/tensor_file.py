"""Open files of tensors: the base class of all formats, views of open files, tensors in memory."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from ft_ckpt.errors import CorruptError, LoadError, listing
from ft_ckpt.formats.dtypes import dtype_name, dtype_of, is_within
from ft_ckpt.formats.layout import Spec
from ft_ckpt.storage.io import ByteRun

_EMPTY: Mapping[str, str] = MappingProxyType({})
_NO_CASTS: Mapping[str, int] = MappingProxyType({})


class TensorFile(ABC):
    """An open file, or folder, of tensors in any format. Tensors are read on request.

    A class sets `specs` and overrides `read`. The other defaults are right for a file that has only
    tensors, if these have to be read through their format.
    """

    # The tensors by name, in file order. Their values are not read for it.
    specs: Mapping[str, Spec]
    # further name of a tensor -> its name in `specs`
    ties: Mapping[str, str] = _EMPTY
    metadata: Mapping[str, str] = _EMPTY
    # "name: kind" of each value that is not a tensor
    skipped: Sequence[str] = ()
    # number of tensors that are cast as they are read, such as {"float32->bfloat16": 12}
    casts: Mapping[str, int] = _NO_CASTS

    @abstractmethod
    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Read elements [start, stop) of a tensor in row-major order.

        The result is 1-D, contiguous and on the CPU. Only its bytes are read, and writes to it
        never reach the file. Raises CorruptError when the file is damaged, or has changed since it
        was opened.
        """

    def runs(self, name: str) -> Sequence[ByteRun] | None:
        """Return the byte ranges that make up a tensor, in order.

        Returns None if the tensor has to be read through its format.
        """
        return None

    def close(self) -> None:  # noqa: B027 - a file in memory has nothing to close
        """Close the file. Tensors that were read stay valid."""


class StoredTensor(NamedTuple):
    """A tensor of an open file, by its name in that file."""

    file: TensorFile
    name: str


class TensorView(TensorFile):
    """A view of open files that renames their tensors and casts them to other dtypes."""

    def __init__(
        self,
        files: Iterable[TensorFile],
        sources: Mapping[str, StoredTensor],
        *,
        dtypes: Mapping[str, str] = _EMPTY,
        ties: Mapping[str, str] = _EMPTY,
        metadata: Mapping[str, str] = _EMPTY,
        skipped: Sequence[str] = (),
    ) -> None:
        """Make a view of `files`, which are closed with it.

        `sources` has the stored tensor for each name of the view. `dtypes` has the dtype, by name,
        to which a tensor is cast as it is read.
        """
        self.files, self.sources = tuple(files), dict(sources)
        self.ties, self.metadata, self.skipped = dict(ties), dict(metadata), tuple(skipped)
        self.overflown: set[str] = set()  # names of tensors in which a cast gave infinity
        specs: dict[str, Spec] = {}
        casts = Counter[str]()
        for file in self.files:
            casts.update(file.casts)
        for name, (file, stored_name) in self.sources.items():
            stored = file.specs[stored_name]
            dtype = dtypes.get(name, stored.dtype)
            specs[name] = Spec(name, stored.shape, dtype)
            if dtype != stored.dtype:
                casts[f"{stored.dtype}->{dtype}"] += 1

        self.specs, self.casts = specs, dict(casts)

    @classmethod
    def of_file(
        cls,
        file: TensorFile,
        names: Mapping[str, str],
        *,
        dtypes: Mapping[str, str] = _EMPTY,
        ties: Mapping[str, str] = _EMPTY,
        metadata: Mapping[str, str] = _EMPTY,
        skipped: Sequence[str] = (),
    ) -> "TensorView":
        """Make a view of one file; `names` has the name in the file for each name in the view."""
        sources = {name: StoredTensor(file, stored_name) for name, stored_name in names.items()}
        return TensorView(
            [file], sources, dtypes=dtypes, ties=ties, metadata=metadata, skipped=skipped
        )

    @property
    def stored_names(self) -> dict[str, str]:
        """The name that each tensor has in its file."""
        return {name: source.name for name, source in self.sources.items()}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Read flat elements [start, stop) of a tensor, on the CPU, in the dtype of its spec."""
        file, stored_name = self.sources[name]
        data = file.read(stored_name, start, stop)
        dtype = dtype_of(self.specs[name].dtype)
        if data.dtype == dtype:
            return data
        cast = data.to(dtype)
        if not is_within(data, dtype) and _has_overflown(data, cast):
            self.overflown.add(name)
        return cast

    def runs(self, name: str) -> Sequence[ByteRun] | None:
        """Return the byte ranges of a tensor in its file, or None if it is cast."""
        file, stored_name = self.sources[name]
        if file.specs[stored_name].dtype != self.specs[name].dtype:
            return None
        return file.runs(stored_name)

    def close(self) -> None:
        """Close the files."""
        for file in self.files:
            file.close()


def _has_overflown(data: Tensor, cast: Tensor) -> bool:
    return bool((cast.isinf() & data.to(torch.float64).isfinite()).any())


class JoinedFile(TensorView):
    """Several files as one, with a prefix for the names of each."""

    def __init__(self, files: Sequence[tuple[str, TensorFile]], source: str) -> None:
        """Join `files`, which are pairs of a prefix and a file.

        Raises LoadError, naming `source`, if several tensors have the same name.
        """
        sources: dict[str, StoredTensor] = {}
        ties: dict[str, str] = {}
        metadata: dict[str, str] = {}
        skipped: list[str] = []
        repeated: list[str] = []
        for prefix, file in files:
            for name in file.specs:
                full_name = prefix + name
                if full_name in sources:
                    repeated.append(full_name)
                sources[full_name] = StoredTensor(file, name)
            for name, stored_name in file.ties.items():
                ties[prefix + name] = prefix + stored_name
            metadata.update(file.metadata)
            skipped += [prefix + value for value in file.skipped]

        if repeated:
            raise LoadError(
                f"{source}: {listing(repeated, ', ')}: in several of its files; expected each "
                "tensor once"
            )

        opened = [file for _, file in files]
        super().__init__(opened, sources, ties=ties, metadata=metadata, skipped=skipped)


class MemoryFile(TensorFile):
    """Tensors in memory as a file."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)
        self.specs = {
            name: Spec(name, tuple(tensor.shape), dtype_name(tensor.dtype))
            for name, tensor in self.tensors.items()
        }

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Copy elements [start, stop) of the flat tensor."""
        return self.tensors[name].detach().contiguous().view(-1)[start:stop].clone()

    def close(self) -> None:
        """Release the tensors."""
        self.tensors = {}


class ListedFile(TensorFile):
    """A file of a checkpoint that is opened at its first read."""

    def __init__(
        self, where: str, specs: Mapping[str, Spec], open_file: Callable[[], TensorFile]
    ) -> None:
        """List `specs` before the file is opened; `where` is the file in errors.

        `specs` are the tensors that the manifest lists.
        """
        self.where, self.specs, self._open_file = where, specs, open_file

    @cached_property
    def file(self) -> TensorFile:
        """The open file. Raises CorruptError when its tensors differ from the manifest's."""
        opened = self._open_file()
        wrong = [name for name, spec in self.specs.items() if opened.specs.get(name) != spec]
        if wrong:
            opened.close()
            raise CorruptError(
                f"{self.where}: {listing(wrong, ', ')}: not as the manifest "
                "says; use another checkpoint"
            )
        return opened

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        return self.file.read(name, start, stop)

    def runs(self, name: str) -> Sequence[ByteRun] | None:
        return self.file.runs(name)

    def close(self) -> None:
        if "file" in vars(self):
            self.file.close()
