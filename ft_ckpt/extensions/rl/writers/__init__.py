"""Lets several processes, the writers, hand in their state for each checkpoint of a run.

Nothing here commits a checkpoint. Begin at `session_files`, which describes the files that the
trainer's `session` and a `writer` exchange.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
