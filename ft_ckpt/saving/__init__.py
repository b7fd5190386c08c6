"""One save, from the request to the commit: plan, snapshot, files, writing by every rank, in the
background too.

Nothing here decides when to save or what to keep. Begin at `execute`, the steps of every save.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
