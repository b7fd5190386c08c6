"""Copies committed checkpoints to and from folders, buckets and the Hugging Face Hub.

| room | holds |
|---|---|
| `sending` | the public functions: copy, sync, push and pull, uploads of a run |
| `hub` | repositories and storage buckets of the Hugging Face Hub |
| `endpoints` | the kinds of places, and the files that are sent |
| `copies` | a copy between two stores: whole or not at all, with its signature |

Nothing here decides the content of a checkpoint or needs torch. Begin at `endpoints.endpoints`.
"""
