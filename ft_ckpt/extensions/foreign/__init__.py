"""Files of other programs: PyTorch, DCP, Lightning, Accelerate, Keras, flax, orbax, TensorFlow.

Nothing here runs what a file contains. Begin at `torch_file`, then read one other, `lightning`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
