"""Opens paths and URLs as places, and copies objects between them.

A place is a file or folder on a disk, or an object or prefix in a bucket.

Nothing here knows checkpoints. Begin at `place`, then `locations`, which has the table of schemes.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
