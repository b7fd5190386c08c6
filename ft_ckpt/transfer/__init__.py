"""Sends committed checkpoints to other places, and fetches them from there: folders, buckets, the Hub.

Nothing here decides what a checkpoint holds, changes one, or needs torch. Begin at `push`: a line for each kind of
place, and at `copies`, which moves them between folders and buckets. What is sent to the Hub is chosen in `outgoing`;
its modules are called `hub_...`.
"""
