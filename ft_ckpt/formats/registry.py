"""All tensor formats by name, those of ft_ckpt and those of installed distributions.

A format is a `TensorFormat`. Those of ft_ckpt are in a table of import strings. Another
distribution brings one by an entry point in the group `ft_ckpt.formats`: its name is the name of
the format, and its object is a class or an instance. Importing this module imports no format and no
torch.
"""

from functools import cache
from importlib.metadata import entry_points
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from ft_ckpt.errors import ConfigError
from ft_ckpt.extension_points import load_extension
from ft_ckpt.messages import expected_one_of

if TYPE_CHECKING:
    from ft_ckpt.formats.tensor_format import TensorFormat

DEFAULT_FORMAT = "safetensors"
ENTRY_POINTS = "ft_ckpt.formats"
# In the order in which messages list the formats and readers of a folder choose. Of two that
# recognise a file or a folder, the more specific one is later.
_CLASSES = (
    "ft_ckpt.formats.safetensors.safetensors_format:Safetensors",
    "ft_ckpt.extensions.hdf5.formats:Hdf5",
    "ft_ckpt.extensions.hdf5.formats:Dual",
    "ft_ckpt.extensions.foreign.formats:Torch",
    "ft_ckpt.extensions.hdf5.formats:Keras",
    "ft_ckpt.extensions.foreign.formats:Flax",
    "ft_ckpt.extensions.foreign.formats:TensorFlow",
    "ft_ckpt.extensions.foreign.formats:Orbax",
    "ft_ckpt.extensions.foreign.formats:Dcp",
    "ft_ckpt.extensions.foreign.formats:Lightning",
)
_FORMATS: "dict[str, TensorFormat]" = {}


def register_format(tensor_format: "TensorFormat") -> None:
    """Add a format to this process. Files are offered to it before the existing formats."""
    _formats()[tensor_format.name] = tensor_format


def _formats() -> "dict[str, TensorFormat]":
    if not _FORMATS:
        for import_string in _CLASSES:
            tensor_format = load_extension(import_string)()
            _FORMATS[tensor_format.name] = tensor_format
    return _FORMATS


@cache
def load_installed_formats() -> tuple[str, ...]:
    """Add the formats of installed distributions, and return their names.

    The search takes a while, so call this when no registered format fits. Raises ConfigError as
    `load_installed` does.
    """
    from ft_ckpt.formats.installed import load_installed

    names = []
    for entry in entry_points(group=ENTRY_POINTS):
        tensor_format = load_installed(entry, _formats())
        register_format(tensor_format)
        names.append(tensor_format.name)
    return tuple(names)


def tensor_formats(for_name: str = DEFAULT_FORMAT) -> "tuple[TensorFormat, ...]":
    """Return all formats, in the order in which messages list them and readers of a folder choose.

    Formats of installed distributions are included if `for_name` is not one of the others, or if
    they were needed before.
    """
    if for_name not in _formats():
        load_installed_formats()
    return tuple(_formats().values())


def written_formats(for_name: str = DEFAULT_FORMAT) -> "list[TensorFormat]":
    """Return the formats that tensors can be written in; see `tensor_formats`."""
    return [tensor_format for tensor_format in tensor_formats(for_name) if tensor_format.is_written]


def format_named(name: str) -> "TensorFormat":
    """Return the format called `name`. Raises ConfigError when there is none."""
    for tensor_format in tensor_formats(name):
        if tensor_format.name == name:
            return tensor_format
    raise ConfigError(f"format {name!r}: {expected_one_of(name, _formats())}")


def checkpoint_format_of(name: str) -> "TensorFormat":
    """Return the format of a weight file, by the suffix of its name.

    Unknown suffixes get the default format, whose reader rejects the file.
    """
    suffix = PurePosixPath(name).suffix
    tensor_format = _checkpoint_format(suffix)
    if tensor_format is None and load_installed_formats():
        tensor_format = _checkpoint_format(suffix)
    return tensor_format or format_named(DEFAULT_FORMAT)


def _checkpoint_format(suffix: str) -> "TensorFormat | None":
    for tensor_format in _formats().values():
        if tensor_format.serves_checkpoints and suffix in tensor_format.suffixes:
            return tensor_format
    return None
