"""What a save is asked for, and what it will write: parts, tensors, files, and which rank writes
which bytes.

Nothing here writes a byte. Begin at `request`, then `plan`, then `write_plan`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
