"""Files of other programs: PyTorch, DCP, Lightning, Accelerate, flax, orbax, TensorFlow.

Nothing here runs what a file contains. Begin at `formats`; then read one, `lightning`. The room
`torch_files` has the files of torch.
"""
