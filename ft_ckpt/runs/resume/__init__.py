"""A resume, from the choice of a checkpoint to the report.

Nothing here overwrites the run before `restore_run`. Begin at `resuming`, which calls the other
modules step by step.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
