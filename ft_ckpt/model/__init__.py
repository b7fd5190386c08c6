"""One model as Hugging Face and PEFT know it: stored names, ties, adapters and their base, config,
tokenizer, loading.

Nothing here puts a saved checkpoint in place.
Only `base_model` communicates with other ranks. Begin at `parts`, which turns a save
request into parts, and at `load`, which is `ft_ckpt.load_model`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
