"""HDF5 by h5py: the formats `h5` and `dual`, and the layout of Cerebras.

Nothing here knows folders of checkpoints. Begin at `hdf5`, the reader; `hdf5_layout` lays out a
file that our writer fills, `hdf5_skeleton` makes its header, `hdf5_compressed` writes gzip, `dual`
is one file with two headers, `cerebras` the attributes of a Cerebras checkpoint.
"""
