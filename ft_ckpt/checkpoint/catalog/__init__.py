"""The checkpoints of a run: their list, their metrics, the latest and the best.

Nothing here changes a folder. Begin at `catalog`, then `selection`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
