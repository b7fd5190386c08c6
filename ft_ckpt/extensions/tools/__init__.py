"""Operations on files of weights. Each subpackage has its own front.

| subpackage | holds |
|---|---|
| `converting` | weights from one format to another: slices, renamed tensors, folders |
| `merging` | adapters merged into their base, live or from files |
| `averaging` | the weighted average of checkpoints |

Nothing here is part of a save of a plain model. `diff` compares two sources. `objects` has
`ft_ckpt.save` and `ft_ckpt.load`. Begin at `converting.conversion`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
