"""A copy of a committed checkpoint.

Nothing here talks to the Hub. Begin at `store_copies`; `identity` tells whether two copies are the
same, `pull_cache` keeps pulled ones.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
