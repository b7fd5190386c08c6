"""Opens HDF5 files: those of ours by their index alone, all others through the HDF5 library."""

from ft_ckpt.formats.raw_file import RawFile
from ft_ckpt.formats.tensor_file import IndexedFile
from ft_ckpt.formats.tensor_index import read_index

SIGNATURE = b"\x89HDF\r\n\x1a\n"
_LEAST_USER_BLOCK, _MOST_USER_BLOCK = 512, 1 << 30


def is_hdf5(file: RawFile) -> bool:
    """True when the signature of HDF5 is at the start of the file, or after a user block other than a dual file's."""
    return _is_signature_at(file, 0) or (file.size_bytes > 8 and file.bytes(8, 1) != b"{" and has_user_block(file))


def has_user_block(file: RawFile) -> bool:
    """True when the signature comes after other bytes, which end at 512 * 2**n."""
    at = _LEAST_USER_BLOCK
    while at <= min(file.size_bytes, _MOST_USER_BLOCK):
        if _is_signature_at(file, at):
            return True
        at *= 2
    return False


def _is_signature_at(file: RawFile, start: int) -> bool:
    size = len(SIGNATURE)
    return start + size <= file.size_bytes and file.bytes(start, size) == SIGNATURE


def open_hdf5(raw: RawFile, verify: bool = False) -> IndexedFile:
    """The tensors of an HDF5 file: ours, a Cerebras checkpoint, or any other of plain datasets and groups.

    Raises CorruptError when it is damaged, incomplete, or leads outside itself.
    """
    index = read_index(raw)
    if index is not None:
        file = IndexedFile(raw, index, verify)
        if any(len(row) > 5 for row in index.rows.values()):
            from ft_ckpt.formats.hdf5.chunks import chunk_readers  # which needs the filters' package

            file.readers = chunk_readers(raw, index)
        return file
    from ft_ckpt.formats.hdf5.foreign import open_foreign  # brings h5py, which a file of ours does not need

    return open_foreign(raw, verify)
