"""Sharding of tensors under every wrapper, movement of their elements between ranks, and agreement
of ranks.

Nothing here uses paths or depends on the purpose of a tensor. Begin at `tensors`, which lists the
tensors of a wrapped model, at `wrappers`, which lists the kinds of wrappers, and at `ranks`,
through which ranks agree.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
