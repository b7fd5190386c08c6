"""HDF5: files laid out by us to be mapped, and the careful reading of files that others wrote.

Writing never uses the HDF5 library, which takes the process down on a full disk; reading foreign files does, behind a
probe in a process of its own. Begin at `hdf5_file`, which opens, and `hdf5_layout`.
"""
