"""Bytes on disks and in buckets. Each room has a front of its own.

| room | holds |
|---|---|
| `places` | paths and URLs, the stores that serve them, copies between them |
| `digests` | digests of files, and their comparison before the first use |
| `local` | folders of this machine as stores, locks, trials of file systems |
| `io` | reads and writes of large files at the rate of the disk or network |

Nothing here depends on tensors, models, collectives or manifests, and nothing here imports torch.
Begin at `store`, the interfaces of a store; then `look_ups`, which says what is at a path, and
`local_disk`, the changes of a file system that survive a power cut.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
