"""Sends checkpoints to the Hugging Face Hub, and fetches them.

Nothing here is imported unless a place on the Hub is named. Begin at `repositories`, and then read
`buckets`. Both use `client`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
