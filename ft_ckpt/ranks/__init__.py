"""Agreement of ranks, and tensors under every wrapper.

| subpackage | holds |
|---|---|
| `moving` | movement of elements: gathers, broadcasts, reads into shards, replicas |
| `wrappers` | the tensors of a wrapped model: DDP, FSDP 1 and 2, DTensors, compiled modules |
| `sharding` | which rank holds which elements of a tensor |

Nothing here uses paths or depends on the purpose of a tensor. Begin at `ranks`, through which ranks
agree, and `current`, which returns the ranks of this process; then `wrappers.tensors`, which lists
the tensors of a model.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
