"""Makes models without weights from a config.

Nothing here reads a tensor. Begin at `pretrained`, which makes the transformers model of a folder.
`diffusers` makes models of diffusers. `on_meta` returns only the names and shapes of a model's
tensors.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
