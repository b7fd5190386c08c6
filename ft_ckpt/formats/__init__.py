"""Tensor file formats. Each room has a front of its own.

| room | holds |
|---|---|
| `safetensors` | the format of checkpoints; one to read first |
| `index` | the index of tensors that a file has beyond its header |
| `files` | open files: their bytes, their tensors, reads onto a device |
| `trees` | nested values with tensors as leaves, as JSON |

A format that writes returns the complete layout of a file before the first tensor byte is
available. Readers describe tensors before they read them, and run nothing of a file. Nothing here
depends on steps, process groups, models or ft_ckpt's checkpoint folders. Begin at `tensor_format`,
which says what a format is; `registry` has the table of all formats, `installed` loads those of
other distributions.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
