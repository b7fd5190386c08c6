"""Copies a committed checkpoint from one store to another.

Nothing here talks to the Hub. Begin at `store_copies`. `identity` finds out whether two copies are
the same, and `pull_cache` keeps pulled copies.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
