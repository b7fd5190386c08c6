"""Opens folders of weights as one file of tensors, and compares the settings that lie with them.

Nothing here makes a model. Begin at `folder`, which opens a folder. Then `settings` compares
everything but tensors that affects the output of a model.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
