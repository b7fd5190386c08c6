"""What changes a checkpoint's folder: staging, commit, recovery after a kill, deletion.

Nothing here decides which checkpoint is kept. Begin at `commit`, whose opening table lists the ways
to put a checkpoint in place; then `delete`, and `staging`, `object_staging` and `bucket_delete`
for buckets.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
