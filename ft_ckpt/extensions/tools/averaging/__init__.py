"""Averages checkpoints, weighted or not.

Nothing here creates a model. Begin at `averages`. `checks` finds sources that have no average.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
