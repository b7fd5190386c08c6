"""The index of tensors that a file has besides its own header, and files that are read by it.

Nothing here writes a file. Begin at `file_index`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
