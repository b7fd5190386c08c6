"""How the ranks share the writing of a save."""

from enum import Enum


class Mode(Enum):
    """How the ranks share the writing of a save."""

    SHARED = "each rank writes the bytes it holds into every file"
    SPREAD = "each file has one writer, which gathers its tensors"
    MAIN = "rank 0 gathers all tensors and writes all files"
