"""Agreement of ranks, and in the rooms: sharding of tensors under every wrapper, and movement of
their elements between ranks.

Nothing here uses paths or depends on the purpose of a tensor. Begin at `ranks`, through which ranks
agree. The rooms, each above those before it: `sharding`, which rank holds what; `wrappers`, the
tensors of a wrapped model; `moving`, gathers and broadcasts.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
