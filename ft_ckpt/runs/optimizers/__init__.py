"""The state of optimizers: parameter groups, and tensors by the names of parameters.

Nothing here communicates between ranks. Begin at `kinds`: the interface through which a run reads
and restores an optimizer, whichever engine shards it. `torch_optimizers` implements it for plain
PyTorch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
