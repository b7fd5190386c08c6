"""Merges adapters into their base.

Nothing here changes the live model. Begin at `live_merge`, which merges a layer at a time by PEFT's
own merge; `merge_files` does so for stored adapters.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
