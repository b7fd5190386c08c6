"""The kinds of places that checkpoints are sent to and fetched from.

Nothing here imports a client library. Begin at `endpoints`. `stores` has folders and buckets of
object stores. `outgoing` selects the files for a repository.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
