"""Bytes on their way to and from where they are kept: stores (a folder, a bucket), the fast road of a disk, digests.

Nothing here knows tensors, models, ranks' agreements or what a checkpoint is, and nothing here imports torch. Begin at
`store`, what a place that holds bytes can do; then `local_disk`, the durable steps each by one name, and `writer`.
"""
