"""The items of a run: its named objects, and the tensors of its models.

An item is an object whose state a run needs, such as an optimizer or a scheduler. Nothing here
reads or writes a checkpoint. Begin at `run_objects`. `objects` lists the items, `tensors` lists the
tensors of the models, `signatures` recognizes objects that have no name of their own.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
