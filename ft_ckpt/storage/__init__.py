"""Storage of bytes: stores (a local folder, a bucket), direct I/O on disks, digests.

Nothing here depends on tensors, models, collectives or manifests, and nothing here imports torch.
Begin at `store`, the interfaces of a store; then `local_disk`, the durable operations on a file
system, and `writer`.
"""
