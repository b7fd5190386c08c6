"""Saves and loads one model as Hugging Face and PEFT do. Packages are entered by `__init__.pyi`.

| package | holds | |---|---| | `load` | `load_model`, which loads a committed checkpoint as a
model, with its adapters | | `parts` | the division of a save into parts: which tensors go into
which folder | | `sidecars` | the files that lie with the weights: configs, code, tokenizer, model
card | | `base` | the base model of adapters: its files, its config, its comparison with the
recorded base | | `empty` | models without weights, which transformers or diffusers makes from a
config | | `files` | folders of weights and their settings, opened and compared | | `tensors` | the
plan of stored tensors: from which live tensors, under which names |

Nothing here commits a checkpoint. Only `base.watch` communicates with other ranks.
Begin at `parts.save_parts` for a save, at `load.loading` for `ft_ckpt.load_model`.
"""
