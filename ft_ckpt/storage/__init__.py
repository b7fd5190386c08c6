"""Storage of bytes: the interfaces of a store, and the operations of a local disk.

Nothing here depends on tensors, models, collectives or manifests, and nothing here imports torch.
Begin at `store`, the interfaces; then `local_disk`, the operations that survive a power cut. The
rooms: `io` reads and writes large files, `local` is folders of this machine, `digests` compares
files, `places` opens paths and URLs.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
