"""One model as Hugging Face and PEFT know it: stored names, ties, adapters and their base, config, tokenizer, loading.

Nothing here meets other ranks or moves a checkpoint into place. Begin at `parts`, which turns a request into what is
stored, and at `load`, which is `ft_ckpt.load_model`.
"""
