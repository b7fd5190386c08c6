"""Stores checkpoints in a bucket of S3, Google Cloud or Azure.

Nothing here depends on tensors or imports torch. Begin at `object_store`. `uploads` sends the bytes
of a new object while they are written.
"""
