"""Finds the format of a file by its content or its suffix, and opens its tensors."""

from collections.abc import Iterable
from pathlib import PurePath

from ft_ckpt.errors import ConfigError, LoadError, damaged_input
from ft_ckpt.formats.files import RawFile, TensorFile
from ft_ckpt.formats.registry import load_installed_formats, tensor_formats, written_formats
from ft_ckpt.formats.tensor_format import TensorFormat
from ft_ckpt.storage import Readable


def format_by_suffix(path: PurePath | str) -> TensorFormat:
    """Return the format to write `path` in. Raises ConfigError when none has its suffix."""
    suffix = PurePath(path).suffix
    tensor_format = _written_with(suffix, written_formats())
    if tensor_format is None and load_installed_formats():
        tensor_format = _written_with(suffix, written_formats())
    if tensor_format is None:
        suffixes: list[str] = []
        for candidate in written_formats():
            suffixes += candidate.suffixes
        raise ConfigError(
            f"{path}: {suffix!r} is the suffix of no format; expected one of "
            f"{', '.join(dict.fromkeys(suffixes))}, or format="
        )
    return tensor_format


def _written_with(suffix: str, formats: Iterable[TensorFormat]) -> TensorFormat | None:
    for tensor_format in formats:
        if suffix.lower() in tensor_format.suffixes:
            return tensor_format
    return None


def detect_format(file: RawFile) -> TensorFormat:
    """Return the format of an open file, by its content. Raises LoadError for an unknown format."""
    tensor_format = _recognising(file)
    if tensor_format is None and load_installed_formats():
        tensor_format = _recognising(file)
    if tensor_format is None:
        head = bytes(file.bytes(0, min(16, file.size_bytes)))
        raise LoadError(
            f"{file.file.where}: begins with {head!r}; expected HDF5, safetensors or "
            "a file of torch.save"
        )
    return tensor_format


def _recognising(file: RawFile) -> TensorFormat | None:
    # the more specific of two matching formats is registered later
    for tensor_format in reversed(tensor_formats()):
        if tensor_format.recognises(file):
            return tensor_format
    return None


def open_tensor_file(file: Readable) -> TensorFile:
    """Open the tensors of a single file, which are read by copying.

    Raises LoadError or CorruptError as its format does.
    """
    raw = RawFile(file, mapped=False)
    with damaged_input(raw.name):
        return detect_format(raw).open(raw)
