"""The state of a run beside its weights, saved and restored: optimizers, random numbers, data position.

Nothing here writes files. Begin at `run`, which knows the objects of a run, at `state`, which turns them into entries
of a checkpoint, and at `resume`, which restores them.
"""
