"""Models without weights, made of a config.

Nothing here reads a tensor. Begin at `pretrained`, the model of a folder; `diffusers` makes those
of diffusers, `on_meta` gives names and shapes alone.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
