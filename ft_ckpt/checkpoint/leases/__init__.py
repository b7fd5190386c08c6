"""Marks in a checkpoint's folder that guard it: leases of readers and saves, pins.

Nothing here deletes a checkpoint. Begin at `leases`, the marks that a process renews; then `marks`,
the table of all.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
