"""The functions that copy, sync, push and pull checkpoints.

Nothing here knows how a kind of place stores files. Begin at `syncing`, which has copy and sync.
`pushing` has push and pull, and `uploads` has the uploads of a run in training.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
