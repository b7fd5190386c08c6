"""Single files and plain folders of weights: `ft_ckpt.save` and `load`, lazy tensors, conversion, averages, comparison.

Nothing here knows ranks or runs. Begin at `objects` for save and load, at `convert` for conversion.
"""
