"""Tensor file formats: how each lays out tensors, is recognised, and is read without running anything in it.

A format answers with its whole layout before a byte is there, and readers describe tensors before they are read.
Nothing here knows steps, ranks, models or folders of checkpoints. Begin at `registry`, which lists the formats, and at
`layout`; then read one format, `safetensors`.
"""
