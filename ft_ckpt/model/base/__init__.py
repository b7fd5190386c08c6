"""Finds the base model of adapters: its files on this machine, its class and its config.

Nothing here selects tensors for a save. Begin at `files`. `samples` compares a base with the
recorded one, by sampled elements.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
