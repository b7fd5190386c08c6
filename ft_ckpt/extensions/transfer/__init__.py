"""Copies committed checkpoints to and from folders, buckets and the Hugging Face Hub.

| subpackage | holds |
|---|---|
| `sending` | the public functions: copy, sync, push, pull, and the uploads of a run |
| `hub` | repositories and storage buckets of the Hugging Face Hub |
| `endpoints` | the kinds of places, and the files that are sent |
| `copies` | copies of a checkpoint between two stores, each complete or not there at all |

Nothing here decides the content of a checkpoint or needs torch. Begin at `endpoints.endpoints`.
"""
