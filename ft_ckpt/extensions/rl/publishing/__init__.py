"""Publishes a checkpoint into inference servers, and proves that they hold it.

Nothing here changes a checkpoint. Begin at `publishing`: its steps are in `source` (the
checkpoint), `adapter` and `weights`, with `weights_update` (one server) and `weights_before`
(restoring).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
