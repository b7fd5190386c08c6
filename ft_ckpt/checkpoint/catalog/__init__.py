"""The checkpoints of a run: their list and order, their metrics, the latest and the best.

| module | holds |
|---|---|
| `catalog` | the list of checkpoints in a folder, and their order |
| `selection` | the latest and the best valid checkpoint |
| `metrics` | metrics that were measured after a save |

Nothing here changes a folder. Begin at `catalog`, then `selection`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
