"""Operations on files of weights: convert, average, merge adapters, compare, save and load objects.

Nothing here is part of a save of a plain model. Begin at `converting`, or at `objects`, which is
`ft_ckpt.save` and `ft_ckpt.load`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
