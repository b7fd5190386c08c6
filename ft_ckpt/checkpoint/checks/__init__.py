"""Comparison of a checkpoint's files with its manifest.

| module | holds |
|---|---|
| `problems` | differences in sizes, headers, indexes and digests |
| `verification` | `verify` and its report |
| `signature` | signatures in the format of OpenSSF's model-signing |

Nothing here changes a folder. Begin at `problems`, then `verification`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
