"""One model as Hugging Face and PEFT know it: stored names, ties, adapters and their base, config, tokenizer, loading.

Nothing here puts a checkpoint in place; `base_model` alone communicates with other ranks. Begin at `parts`, which turns
a request into what is stored, and at `load`, which is `ft_ckpt.load_model`.
"""
