"""One model as Hugging Face and PEFT know it: stored names, ties, adapters and their base, config,
tokenizer, loading.

Nothing here puts a saved checkpoint in place; only `base_watch` communicates with other ranks.
Begin at `parts` for a save: `selection` and `adapters` choose the tensors, `conversion` their names
and form in files, `part_files` writes config and card. Begin at `load` for `ft_ckpt.load_model`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
