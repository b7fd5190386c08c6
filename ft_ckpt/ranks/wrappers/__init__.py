"""Wrappers of a model and kinds of tensors: DDP, FSDP 1 and 2, DTensors, compiled modules.

Nothing here reads or writes a file. Begin at `tensors`, which lists the tensors of a wrapped model,
then `wrappers` and `tensor_kinds`, the two tables.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
