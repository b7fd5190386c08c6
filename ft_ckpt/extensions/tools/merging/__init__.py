"""Merges adapters into their base.

Nothing here changes the live model. Begin at `live_merge`, which lets PEFT merge one layer at a
time. `merge_files` does the same for stored adapters.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
