"""Copies committed checkpoints to and from folders, buckets and the Hugging Face Hub.

Nothing here decides the content of a checkpoint or needs torch. Begin at `pushing`, which has a
module for each URL scheme, and at `copies`, which copies between folders and buckets. `outgoing`
selects the files for a repository on the Hub; `hub` is the client for repositories, `hub_buckets`
for the Hub's storage buckets.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
