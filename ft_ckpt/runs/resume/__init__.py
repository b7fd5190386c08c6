"""A resume, from the choice of a checkpoint to the report.

Nothing here is overwritten before `restore_run`. Begin at `resuming`, which calls the steps in
their order.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
