"""The samples of asynchronous training: which were trained, not how many were drawn.

Nothing here needs torch or numpy. Begin at `frontier`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
