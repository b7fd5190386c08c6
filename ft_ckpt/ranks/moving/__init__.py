"""Movement of elements between ranks: gathers, broadcasts, reads into shards, comparisons.

Nothing here knows wrappers. Begin at `gather`, the way of a save, and at `fill`, that of a load.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
