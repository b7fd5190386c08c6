"""Averages checkpoints, weighted or not.

Nothing here makes a model. Begin at `averages`; `checks` refuses what has no average.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
