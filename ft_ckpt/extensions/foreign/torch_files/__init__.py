"""Files of `torch.save`: read, laid out and saved.

Nothing here unpickles without a table of allowed classes. Begin at `values`, which loads a file;
`tensors` opens one as a file of tensors, `sums` compares its checksums, `layout` and `saving`
write.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
