"""Checkpoint folders: manifest, commit and recovery, listing, verification, retention and deletion.

Nothing here depends on tensor values, models or wrappers, and nothing here imports torch. Begin at
`commit`, whose opening table lists the ways to put a checkpoint in place, at `catalog`, which lists
checkpoints, and at `problems`, which compares their files with the manifest.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
