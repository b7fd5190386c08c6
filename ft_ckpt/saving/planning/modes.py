"""Defines the modes in which ranks share the writing of a save."""

from enum import Enum


class Mode(Enum):
    """How the ranks share the writing of a save; the value is the mode in words."""

    SHARED = "each rank writes the bytes it holds into every file"
    SPREAD = "each file has one writer, which gathers its tensors"
    MAIN = "rank 0 gathers all tensors and writes all files"
