"""Nested values with tensors as leaves: flattened, described as JSON, and rebuilt.

Nothing here reads a file. Begin at `pytree`, then `pytree_json`, its text.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
