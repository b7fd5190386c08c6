"""The request of a save, and the plan of what it writes: parts, tensors, files, bytes of a rank.

Nothing here writes a byte. Begin at `request`, then `plan`, then `write_plan`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
