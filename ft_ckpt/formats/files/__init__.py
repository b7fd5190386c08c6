"""Open tensor files: their bytes, their tensors, reads onto a device.

Nothing here knows the layout of one format. Begin at `tensor_file`, which says what an open file
is, then `raw_file`, its bytes.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
