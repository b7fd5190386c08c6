"""Files of other programs: PyTorch, DCP, Lightning, Accelerate, flax, orbax, TensorFlow.

Nothing here runs what a file contains. Begin at `formats`; then read one, `lightning`. Files of
torch have a module each for loading (`torch_file`), checksums, values, tensors, layout and saving.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
