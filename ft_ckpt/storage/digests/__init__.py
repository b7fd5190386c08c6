"""Digests of files that one rank or several wrote, and their comparison before the first use.

Nothing here knows manifests or tensors. Begin at `records`, which says what is recorded of a file,
then `verify_files`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
