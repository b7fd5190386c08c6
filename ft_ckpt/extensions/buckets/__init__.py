"""Object stores: a bucket of S3, Google Cloud or Azure as a store of checkpoints.

Nothing here depends on tensors, and nothing here imports torch. Begin at `object_store`, the
store; `uploads` sends the bytes of a new object while they are written.
"""
