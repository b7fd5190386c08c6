"""Records which samples were trained in asynchronous training.

Nothing here needs torch or numpy. Begin at `frontier`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
