"""The state of a run beside its weights, out and in: optimizers, random numbers, place in the data, resuming.

Nothing here writes files. Begin at `run`, which knows the objects of a run, at `state`, which turns them into entries
of a checkpoint, and at `resume`, which puts them back.
"""
