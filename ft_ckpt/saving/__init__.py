"""One save, from the request to the commit, in the background too.

The room `planning` holds what a save is asked for and what it will write; the modules here do it:
snapshot, files, writing by every rank, commit. Nothing here decides when to save or what to keep.
Begin at `execute`, the steps of every save.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
