"""A training run: what it saves, and how it resumes.

| package | holds |
|---|---|
| `resume` | a resume: choose a checkpoint, open it on all ranks, match, compare, restore |
| `saves` | the saves of a run, and what follows a commit |
| `loop` | the run in its training loop: progress, triggers of saves, signals |
| `state` | the training state as a document and entries: captured, read, reported |
| `items` | the named objects of a run, and the tensors of its models |
| `optimizers` | the state of optimizers by parameter name |
| `data` | positions in data loaders, and random number generators |
| `folder` | the directory of a run: lease, places, pruning, following |

Nothing here writes files of weights. Begin at `resume.resuming` or at `saves.run_saves`.
"""
