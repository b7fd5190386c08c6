"""The state of optimizers: parameter groups and tensors by parameter name.

Nothing here communicates between ranks. Begin at `kinds`: what a run asks of an optimizer, whoever
partitions it. `torch_optimizers` is the kind of plain torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
