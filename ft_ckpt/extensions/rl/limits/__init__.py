"""What engines accept of a checkpoint, from its files alone.

Nothing here talks to a server. Begin at `preflight`; `exporting` converts adapters to what all
versions of an engine apply in the same way.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
