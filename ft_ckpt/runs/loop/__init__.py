"""A run in its training loop: its objects, its progress, and what makes a save due.

Nothing here opens a checkpoint. Begin at `training_run`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
