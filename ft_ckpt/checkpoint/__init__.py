"""The folder that is a checkpoint: its manifest, commit and recovery, what is there, what is kept and deleted.

Nothing here knows tensors' values, models or wrappers, and nothing here imports torch. Begin at `commit`, whose opening
table lists the ways to put a checkpoint in place, and at `catalog`, which lists and verifies.
"""
