"""Opens torch files as files of named tensors."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ft_ckpt.extensions.foreign.torch_files.stand_ins import identity_of, split_tensors
from ft_ckpt.extensions.foreign.torch_files.sums import compare_sums
from ft_ckpt.extensions.foreign.torch_files.values import load_torch_value
from ft_ckpt.formats import Spec, dtype_name
from ft_ckpt.formats.files import RawFile, TensorFile
from ft_ckpt.storage.io import open_local_file
from ft_ckpt.storage.local import temporary_store
from ft_ckpt.storage.places import copy_object

_NO_COPY: tuple[str | None, Tensor] = (None, torch.empty(0, device="cpu"))


class TorchFile(TensorFile):
    """The tensors of an open torch file by name.

    Checksums are compared before the first read. Tensors in another order than row-major are
    copied, one at a time.
    """

    def __init__(
        self, file: RawFile, tensors: Mapping[str, Tensor], skipped: Sequence[str] = ()
    ) -> None:
        """Describe `tensors`, and make further names of a tensor `ties`.

        `skipped` has "name: kind" of all other values. Raises CorruptError if elements repeat more
        often than is plausible for the size of the file.
        """
        self.file, self.skipped = file, tuple(skipped)
        self.specs: dict[str, Spec] = {}
        self.ties: dict[str, str] = {}  # further name of a tensor -> its name
        self.tensors: dict[str, Tensor] = {}
        self._are_compared = False
        self._copied = _NO_COPY
        names: dict[tuple[Any, ...], str] = {}
        for name, tensor in tensors.items():
            first = names.setdefault(identity_of(tensor), name) if tensor.numel() else name
            if first != name:
                self.ties[name] = first
                continue
            file.reserve_virtual_bytes(
                max(0, tensor.nbytes - tensor.untyped_storage().nbytes()), name
            )
            self.specs[name] = Spec(name, tuple(tensor.shape), dtype_name(tensor.dtype))
            self.tensors[name] = tensor.detach()

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Read flat elements [start, stop) in row-major order: 1-D, on the CPU, mapped or copied.

        Raises CorruptError when a checksum differs, or the file has changed since it was opened.
        """
        if not self._are_compared:
            compare_sums(self.file)
            self._are_compared = True
        self.file.check()
        tensor = self.tensors[name]
        if tensor.is_contiguous():
            return tensor.view(-1)[start:stop]
        if self._copied[0] != name:
            # frees the last tensor before the next one is copied
            self._copied = _NO_COPY
            self._copied = (name, tensor.contiguous().view(-1))
        return self._copied[1][start:stop]

    def close(self) -> None:
        """Close the file. Tensors that were read stay valid."""
        self.tensors = {}
        self._copied = _NO_COPY
        self.file.close()


def open_torch_file(file: RawFile) -> TorchFile:
    """Open the tensors of a file by `torch.save`, nested dicts and lists as dotted names.

    Nothing in the file is run. Other values are listed in `skipped`, further names of a tensor in
    `ties`. Raises LoadError naming values that are neither tensors nor plain data, and names that
    are not unique; CorruptError when the file is damaged.
    """
    local = local_copy(file)
    return TorchFile(local, *split_tensors(load_torch_value(local), file.name))


def local_copy(file: RawFile) -> RawFile:
    """Return the file, or an open local copy if it is an object in a bucket.

    torch cannot map such an object. The copy has no name any more, so it is deleted when it is
    closed.
    """
    if file.can_map:
        return file
    with temporary_store() as scratch:
        copy_object(file.file, scratch, file.name)
        return RawFile(open_local_file(scratch.path(file.name)))
