"""Storage of bytes: stores (a local folder, a bucket), direct I/O on disks, digests.

Nothing here depends on tensors, models, collectives or manifests, and nothing here imports torch.
Begin at `store`, the interfaces of a store; then `local_disk`, the durable operations on a file
system, and `writer`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
