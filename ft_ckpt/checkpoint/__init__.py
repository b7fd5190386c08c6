"""Checkpoint folders: what is committed, and what may happen to it.

| subpackage | holds |
|---|---|
| `commit` | changes of a folder: staging, commit, recovery after a kill, deletion |
| `catalog` | the checkpoints of a run: their list, their metrics, the latest and the best |
| `checks` | comparison of files with the manifest: sizes, headers, digests, the signature |
| `leases` | the marks that guard a folder: of readers, of saves, pins |
| `manifest` | the record of a checkpoint, and the contents of a folder |

Nothing here depends on tensor values, models or wrappers, and nothing here imports torch. Begin at
`opening`, the one handle of a checkpoint for all its readers; then `commit.commit`, whose opening
table lists the ways to put a checkpoint in place.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
