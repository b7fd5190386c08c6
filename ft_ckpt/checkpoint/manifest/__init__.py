"""The manifest of a checkpoint, and the contents of a folder.

| module | holds |
|---|---|
| `manifest` | the records of a manifest and their JSON form |
| `stored_manifest` | reading the manifest of the checkpoint in a store |
| `contents` | a description of what a place contains, for errors and answers |
| `misleading` | files that readers would take for weights of the checkpoint |
| `cards` | model cards, which may change after a save |

Nothing here changes a folder. Begin at `manifest`, then `stored_manifest` and `contents`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
