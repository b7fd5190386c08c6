"""Places: a path or URL and the store that serves it; copies between places.

Nothing here knows checkpoints. Begin at `place`, then `locations`, which has the table of schemes.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
