"""Converts weights between formats, slice by slice.

Nothing here changes values, except by casts. Begin at `conversion`. `folder` converts a whole
folder, and `request` checks the arguments.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
