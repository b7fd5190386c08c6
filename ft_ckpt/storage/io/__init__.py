"""Reads and writes large files at the rate of the disk or network.

Files are read before the caller needs their bytes, and large writes use direct I/O, which bypasses
the page cache. Nothing here knows why a file is read or written. Begin at `prefetch`, which reads,
and at `writer`, which writes.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
