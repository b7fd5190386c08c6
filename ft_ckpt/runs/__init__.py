"""The training state of a run, captured and restored: optimizers, random numbers, data position.

Nothing here writes checkpoints. Begin at `run`, which holds the objects of a run, at `state`, which
turns them into entries of a checkpoint, and at `resume`, which restores them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
