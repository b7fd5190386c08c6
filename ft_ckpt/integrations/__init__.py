"""Trainers and trackers of other libraries, and functions that replace those of their scripts.

Nothing here decides the content of a checkpoint or how it is written. Begin at `trainer`, the
callback of transformers and TRL, at `lightning`, at `trackers`, or at `open_instruct`;
`open_instruct_state` has the state of its GRPO runs.
"""
