"""The transfers that users ask for.

Nothing here knows how a kind of place stores files. Begin at `syncing`, copy and sync; `pushing`
has push and pull, `uploads` those of a run in training.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
