"""What saving and loading cost, beside the machine's limits and every installed peer: `python -m scripts.bench`.

Modules named after a measure hold it; `savers`, `loaders` and `background` say how each library is called.
"""
