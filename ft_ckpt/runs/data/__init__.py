"""Where a run is in its data: positions in data loaders, and random number generators.

Nothing here writes to disk. Begin at `position`, the position in one loader; `positions` has those
of a run.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
