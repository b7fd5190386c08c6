"""Folders of this machine as stores, locks of their files, and trials of file systems and buckets.

Nothing here needs a client of buckets. Begin at `local_store`, the store of a folder, then
`locks`, which show whether a process is alive.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
