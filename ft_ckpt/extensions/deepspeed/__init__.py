"""DeepSpeed: gathers the weights of ZeRO-3, and captures and restores the optimizers of ZeRO.

Nothing here imports deepspeed before a model of it is met. Begin at `zero`, the wrapper, and at
`zero_optimizer`, the states of its optimizers.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
