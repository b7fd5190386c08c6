"""Memory that the host does not read: which accelerators there are, copies to and from them, and pinned host memory.

Nothing here knows files, formats, models or ranks. torch's words for all accelerators are used, never those for one
kind, so CUDA, ROCm, XPU, NPU and MPS take the same lines. Begin at `copies`, which says when bytes may be used.
"""
