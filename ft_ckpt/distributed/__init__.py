"""Ranks: which elements of each tensor a rank holds under every wrapper, how blocks move, how ranks agree.

Nothing here knows paths or what tensors are for. Begin at `wrappers`, which lists the tensors of a wrapped model, and
at `ranks`, through which ranks meet.
"""
