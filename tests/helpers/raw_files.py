"""Local files as formats receive them."""

import os
from pathlib import Path

from ft_ckpt.formats.files import RawFile
from ft_ckpt.storage.io import open_local_file


def raw_file(path: str | os.PathLike[str], mapped: bool = True) -> RawFile:
    """Open the file at `path`."""
    return RawFile(open_local_file(Path(path)), mapped)
