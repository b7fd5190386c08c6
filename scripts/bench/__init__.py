"""Costs of saving and loading, with those of other libraries and the machine's limits.

`python -m scripts.bench` runs it. Begin at `__main__.main`: it calls the measures that `measures`
lists, each in a module of its name. Such a module has the ways to do one thing, and `common`'s
`in_turns` runs them in rounds. `savers`, `loaders` and `background` call each library. `show`
prints the figures, `pages` and `chart` put them into the documentation.
"""
