"""Places on the Hugging Face Hub.

Nothing here is imported unless a place on the Hub is named. Begin at `repositories`, then
`buckets`; both use `client`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
