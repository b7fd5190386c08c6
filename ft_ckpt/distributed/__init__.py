"""Which elements of each tensor a rank holds under every wrapper, how they move, and how ranks agree.

Nothing here depends on paths or on what tensors are for. Begin at `tensors`, which lists the tensors of a wrapped
model, at `wrappers`, which lists the kinds of wrappers, and at `ranks`, through which ranks agree.
"""
