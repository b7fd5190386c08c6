"""Chains of deltas.

Nothing here needs a server. Begin at `chains`, where the layout on disk is; `rebuilding` reads it.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
