"""What the core works without: each package here adds to it, and the core imports none by name.

Nothing here is needed to save, load or resume a model on a disk in safetensors. Begin at
`hdf5`, one format, or at `buckets`, one kind of store.
"""
