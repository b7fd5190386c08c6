"""HDF5 by h5py: the formats `h5`, `dual` and `keras`, and the layout of Cerebras.

Nothing here knows folders of checkpoints. Begin at `formats`. To read: `hdf5`, which opens files,
`hdf5_datasets`, `cerebras_reader`, `keras`. To write: `cerebras_writer` describes an object,
`hdf5_layout` lays out a file that ft_ckpt's writer fills, `hdf5_skeleton` makes its header,
`hdf5_compressed` writes gzip, `dual` is one file with two headers.
"""
