"""One save, from the request to the commit, in the foreground or in the background.

| subpackage | holds |
|---|---|
| `planning` | the request, and the plan of a save: parts, files, the bytes that each rank writes |

The modules here carry out the plan: `stage`, `agree`, `reuse_frozen`, `write` with `regions`, and
`commit_files` are the steps of `execute`; `background` and `snapshot` run them in a thread;
`folder_sharing` and `range_trial` find out how ranks may share files. Nothing here decides when to
save or which checkpoints to keep. Begin at `execute`, the steps of every save.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
