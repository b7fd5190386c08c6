"""Writes the files that lie with the weights of a model: configs, code, tokenizer, model card.

Nothing here writes weights. Begin at `part_files`, which lets the library of each part write its
files.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
