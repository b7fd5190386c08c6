"""Computes the digests of files, and compares files with their recorded digests.

Nothing here knows manifests or tensors. Begin at `records`, which says what is recorded of a file,
then `verify_files`, which compares.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
