"""Movement of elements between ranks.

| module | holds |
|---|---|
| `gather` | tensors of all ranks to one rank, in buckets: for a save |
| `fill` | stored tensors into the elements of each rank: for a load |
| `broadcast` | stored tensors from rank 0, where each rank would read the same bytes |
| `replicas` | boxes, samples and digests of the elements of a rank |

Nothing here knows wrappers. Begin at `gather`, which saves use, and at `fill`, which loads use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
