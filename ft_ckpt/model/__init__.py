"""One model as Hugging Face and PEFT know it. Each room has a front of its own.

| room | holds |
|---|---|
| `load` | `load_model`: a committed checkpoint as a model, with its adapters |
| `parts` | the parts of a save: which tensors go into which loadable folder |
| `sidecars` | what lies with the weights: configs, code, tokenizer, model card |
| `base` | the base of adapters: its files, config, identity |
| `empty` | models without weights, made of a config by transformers or diffusers |
| `files` | folders of weights and their settings, read |
| `tensors` | the tensors of a live model and the names that they are stored under |

Nothing here puts a saved checkpoint in place; only `base.watch` communicates with other ranks.
Begin at `parts.save_parts` for a save, at `load.loading` for `ft_ckpt.load_model`.
"""
