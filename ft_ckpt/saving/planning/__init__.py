"""The request of a save, and the plan of what it writes.

| module | holds |
|---|---|
| `request`, `report` | what the caller decides; the result of a save |
| `plan` | the steps of planning: parts, their tensors, files and sidecar files |
| `files` | which tensor goes into which file of a part |
| `sidecars` | configs, tokenizer and the caller's files |
| `replicas` | the comparison of tensors that several ranks hold |
| `modes`, `write_plan` | how ranks share the writing; which rank writes which bytes |

Nothing here writes a byte. Begin at `request`, then `plan`, then `write_plan`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
