"""The saves of a run: on schedule, on request, and at the end.

Nothing here captures or restores the state of a run. Begin at `run_saves`. `follow_up` has the
steps after a commit. `extension_parts` has the interfaces of uploads, publishes and writers, which
extensions implement.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
