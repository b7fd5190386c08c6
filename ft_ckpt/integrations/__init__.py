"""Other people's trainers: drop-in replacements for what their scripts call, and callbacks.

Nothing here decides what a checkpoint holds or how it is written. Begin at `trainer`, the callback of transformers and
TRL, at `lightning`, or at `open_instruct`; `open_instruct_state` has the state of its GRPO runs.
"""
