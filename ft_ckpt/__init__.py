"""ft_ckpt: the checkpoint manager for Hugging Face and PEFT fine-tuning.

The names in `__all__` are the public interface. They load on first use, so `import ft_ckpt` is fast
and does not import torch.
"""

import sys

import lazy_loader

from ft_ckpt._version import __version__ as __version__

if sys.platform == "win32":
    raise ImportError(
        "ft_ckpt: Windows lacks the calls that its commits rest on (fcntl, syncing a folder); run "
        "it in WSL 2, on the disk of WSL, see docs/platforms.md"
    )

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
