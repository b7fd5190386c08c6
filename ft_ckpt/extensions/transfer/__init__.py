"""Copies committed checkpoints to and from folders, buckets and the Hugging Face Hub.

Nothing here decides the content of a checkpoint or needs torch. Begin at `endpoints`: the kinds of
places, each with a module (`stores`, `hub`, `hub_buckets`). `copying`, `pushing` and `syncing` are
the public functions; `copies` copies between two stores, `outgoing` selects the files for a
repository on the Hub.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
