"""Plans which tensors of a live model are stored, under which names, in which dtypes.

Nothing here reads or writes a file. Begin at `entries`, which has the classes of the plan. Then
`selection` makes the plan of a whole model.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
