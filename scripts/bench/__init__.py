"""Cost of saving and loading, beside the machine's limits and every installed peer: `python -m
scripts.bench`.

A module named after a measure implements it; `savers`, `loaders` and `background` define how each
library is called.
"""
