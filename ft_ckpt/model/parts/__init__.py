"""Divides a model into the parts of a save. A part is what a library loads from one folder.

Nothing here writes a file. Begin at `save_parts`. `adapters` chooses the tensors of adapters.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
