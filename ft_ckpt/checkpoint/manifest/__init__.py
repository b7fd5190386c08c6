"""The manifest: what is recorded of a checkpoint, as text, and what a folder holds.

Nothing here changes a folder. Begin at `manifest`, the records; then `stored_manifest`, which reads
them, and `contents`, which says what a folder is.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
