"""Opens HDF5 files: those of ours by their index alone, all others through the HDF5 library."""

from pathlib import Path

from ft_ckpt.formats.mapped_file import RawFile
from ft_ckpt.formats.tensor_file import IndexedFile
from ft_ckpt.formats.tensor_index import read_index

SIGNATURE = b"\x89HDF\r\n\x1a\n"


def open_hdf5(path: Path, mapped: bool = True, verify: bool = False) -> IndexedFile:
    """Open an HDF5 file: ours, a Cerebras checkpoint, or any other of plain datasets and groups.

    Raises CorruptError when it is damaged, incomplete, or leads outside itself.
    """
    raw = RawFile(path, mapped)
    index = read_index(raw)
    if index is not None:
        file = IndexedFile(raw, index, verify)
        if any(len(row) > 5 for row in index.rows.values()):
            from ft_ckpt.formats.hdf5.chunks import chunk_readers  # which needs the filters' package

            file.readers = chunk_readers(raw, index)
        return file
    from ft_ckpt.formats.hdf5.foreign import open_foreign  # brings h5py, which a file of ours does not need

    return open_foreign(raw, verify)
