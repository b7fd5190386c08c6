"""The safetensors format: its header, its files, its place in the table of formats.

Nothing here knows which tensors a file should have. Begin at `safetensors_file`; `header` needs no
torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
