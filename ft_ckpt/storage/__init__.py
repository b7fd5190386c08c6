"""Bytes on their way to and from the disk: the local file system, aligned blocks, direct writes, read-ahead, digests.

Nothing here knows tensors, models, ranks' agreements or what a checkpoint is, and nothing here imports torch but for
memory. Begin at `local_disk`, the durable steps each by one name, and at `writer`, which turns bytes into files.
"""
