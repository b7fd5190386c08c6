"""Sends committed checkpoints to other places, and fetches them from there: the Hub of Hugging Face.

Nothing here decides what a checkpoint holds, changes one, or needs torch. Begin at `places`: a line for each kind of
place. What is sent is chosen in `outgoing`; the modules of the Hub are called `hub_...`.
"""
