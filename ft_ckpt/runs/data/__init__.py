"""Where a run is in its data: positions in data loaders, and random number generators.

Nothing here writes to disk. Begin at `position`, which captures and restores the position in one
loader. `positions` has the positions of a run in all of its loaders.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
