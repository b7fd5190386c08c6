"""Marks in a checkpoint's folder that guard it: leases of readers and saves, pins.

| module | holds |
|---|---|
| `leases` | marks that their process renews, and how long a mark is valid |
| `marks` | the names of all marks, and the order of operations in a bucket |
| `reader_leases` | leases of readers: a checkpoint that is being read is not deleted |
| `save_mark` | the mark of a save to a bucket, which excludes other saves |
| `pins` | marks that exempt a checkpoint from all retention rules |

Nothing here deletes a checkpoint. Begin at `leases`, then `marks`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
