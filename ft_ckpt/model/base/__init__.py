"""The base of adapters: its files on this machine, its config, and how it is recognised.

Nothing here selects tensors for a save. Begin at `files`; `samples` identifies a base by sampled
elements.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
