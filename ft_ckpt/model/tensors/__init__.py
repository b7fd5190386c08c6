"""The tensors of a live model: entries of a save, stored names, conversions.

Nothing here reads or writes a file. Begin at `entries`, the plan of the stored tensors; `selection`
fills it for a whole model.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
