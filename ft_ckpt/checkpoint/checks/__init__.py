"""Comparison of a checkpoint's files with its manifest: sizes, headers, digests, signature.

Nothing here changes a folder. Begin at `problems`, then `verification`, the report of `verify`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
