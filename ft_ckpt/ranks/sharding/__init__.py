"""Which rank holds which elements of a tensor.

Nothing here moves an element. Begin at `sharding`, then `source`, a tensor as each rank sees it.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
