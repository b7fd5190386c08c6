"""Wrappers of a model and kinds of tensors.

| module | holds |
|---|---|
| `tensors` | the tensors of a wrapped model, by canonical name |
| `wrappers`, `wrapper` | the table of wrappers; the base class, DDP and compiled modules |
| `tensor_kinds` | the table of tensor kinds |
| `dtensors`, `strided_shards` | DTensors of FSDP2 and tensor parallelism |
| `fsdp1`, `fsdp2` | the modules of FSDP, and the flat parameters of FSDP1 |
| `module_state` | entries of a state dict that are neither parameters nor buffers |

Nothing here reads or writes a file. Begin at `tensors`, then `wrappers` and `tensor_kinds`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
