"""Folders of weights: their files as one file of tensors, and the settings that lie with them.

Nothing here makes a model. Begin at `folder`; `settings` compares what affects the output of a
model.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
