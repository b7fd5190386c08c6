"""The training state in a checkpoint: a JSON document and entries of tensors.

Nothing here opens or commits a checkpoint. Begin at `document`, which checks the stored document.
`capture` makes the document and the entries of a live run. `stored_tensors` reads tensors and
trees. `outcomes` has the result for each item of a resume.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
