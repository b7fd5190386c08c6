"""Stores bytes on disks and in buckets. Its packages are entered by their own `__init__.pyi`.

| package | holds |
|---|---|
| `places` | paths and URLs, the stores that serve them, copies between them |
| `digests` | digests of files, and the comparison of files with them |
| `local` | folders of this machine as stores, locks, trials of file systems and buckets |
| `io` | reads and writes of large files at the rate of the disk or network |

Nothing here depends on tensors, models, collectives or manifests, and nothing here imports torch.
Begin at `store`, which has the interfaces of a store. Then read `look_ups`, which looks up what is
at a path, and `local_disk`, which changes a local file system so that it survives a power cut.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
