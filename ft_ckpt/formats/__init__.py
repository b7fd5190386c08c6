"""Tensor file formats: how each lays out tensors, is recognised, and is read without running
anything in it.

A format that writes returns the complete layout of a file before the first tensor byte is
available. Readers describe tensors before they read them. Nothing here depends on steps, process
groups, models or ft_ckpt's checkpoint folders. Begin at `tensor_format`, which says what a format
is, and at `tensor_file`, which says what an open file is; `registry` has the table of all formats.
Then read one, `safetensors_format`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
