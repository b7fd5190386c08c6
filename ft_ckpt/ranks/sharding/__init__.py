"""Which rank holds which elements of a tensor.

| module | holds |
|---|---|
| `sharding` | the layouts: replicated, owned by one rank, on a mesh, in a flat buffer, opaque |
| `source` | one tensor as each rank sees it: its layout and this rank's elements |
| `runs` | a tensor as a few consecutive pieces of ranks |
| `tensor_kind` | the base class of tensor kinds, and ordinary tensors |
| `engine_parts` | parts of tensors that are refused |
| `groups` | the ranks of process groups |

Nothing here moves an element. Begin at `sharding`, then `source`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
