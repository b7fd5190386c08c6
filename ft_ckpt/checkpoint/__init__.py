"""Checkpoint folders: opened to read, and in the rooms listed, verified, committed and deleted.

Nothing here depends on tensor values, models or wrappers, and nothing here imports torch. Begin at
`opening`, one handle of a checkpoint for all its readers. The rooms, each above those before it:
`manifest`, what is recorded; `leases`, the marks that guard a folder; `checks`, files against the
manifest; `catalog`, the checkpoints of a run; `commit`, what changes a folder.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
