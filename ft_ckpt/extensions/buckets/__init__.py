"""Object stores: a bucket of S3, Google Cloud or Azure as a store of checkpoints.

Nothing here depends on tensors, and nothing here imports torch. Begin at `object_store`, the
store.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
