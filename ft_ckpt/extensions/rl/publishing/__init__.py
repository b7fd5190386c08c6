"""Publishes a checkpoint into inference servers, and proves that they hold it.

Nothing here changes a checkpoint. Begin at `steps`. It opens the checkpoint by `source`, and loads
it by `adapter` or by `weights`. `weights_update` has the steps for one server, and `weights_before`
restores the previous weights.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
