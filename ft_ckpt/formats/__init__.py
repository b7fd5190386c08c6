"""Tensor file formats: how each lays out tensors, is recognised, and is read without running
anything in it.

A format that writes returns the complete layout of a file before the first tensor byte is
available. Readers describe tensors before they read them. Nothing here depends on steps, process
groups, models or ft_ckpt's checkpoint folders. Begin at `tensor_format`, which says what a format
is; `registry` has the table of all formats. The rooms: `trees`, nested values; `files`, open files;
`index`, the index beside a header; `safetensors`, one format to read first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
