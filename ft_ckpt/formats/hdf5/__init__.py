"""HDF5: files laid out by us so that they can be mapped, and the careful reading of files that others wrote.

Nothing here writes through the HDF5 library, which takes the process down on a full disk; reading the files of others
does use it, behind a probe in a process of its own. Begin at `hdf5_file`, which opens, and at
`hdf5_layout`.
"""
