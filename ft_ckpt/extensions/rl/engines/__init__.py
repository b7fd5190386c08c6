"""Inference servers: the requests to them, and the answers to expect.

Nothing here opens a checkpoint to publish it. Begin at `server`, the base class of `vllm` and
`sglang`. `connecting` finds out which one answers.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
