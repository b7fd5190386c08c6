"""Changes of a checkpoint's folder: staging, commit, recovery after a kill, deletion.

| module | holds |
|---|---|
| `staging` | the staging of a save, on a disk or in a bucket |
| `commit`, `recovery` | the commit on a disk; undoing or finishing interrupted saves |
| `object_staging` | the staging and the commit in a bucket |
| `delete`, `bucket_delete` | deletion of a checkpoint or its training state |
| `run_folder` | the folder of a run, in which pruning deletes |

Nothing here decides which checkpoint is kept. Begin at `commit`, whose opening table lists the ways
to put a checkpoint in place; then `delete`, and `object_staging` and `bucket_delete` for buckets.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
