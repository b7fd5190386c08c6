"""The directory of a run: its folders, its lease, and the checkpoints in it.

A place is a folder on a disk or a prefix in a bucket. Nothing here needs torch. Begin at `places`.
`lease` keeps a second process out, `prune` deletes by the rules of retention, `following` waits for
new checkpoints.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
