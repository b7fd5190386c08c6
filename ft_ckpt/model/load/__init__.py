"""Loads a committed checkpoint as a model, strictly.

Nothing here runs code from a checkpoint. Begin at `loading`, whose steps are in `request`, `models`
and `report`. `attaching` adds adapters to their base.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
