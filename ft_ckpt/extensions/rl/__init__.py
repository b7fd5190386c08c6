"""Reinforcement learning: inference servers, samples in flight, writers.

`publishing` loads a committed checkpoint into inference servers and proves that they hold it.
`frontier` keeps the samples of asynchronous training, `writer` is for processes that add a part to
each checkpoint (`session_files` is what they and the trainer's `session` exchange), `deltas` stores
chains of changed elements, which `rebuilding` reads.

Begin at `publishing`: its steps are in `publish_source` (the checkpoint), `publish_adapter` and
`publish_weights`, with `weights_update` (one server) and `weights_before` (restoring). `options`
has its options, `client` is the HTTP client, `servers` has the endpoints of vLLM and SGLang,
`preflight` compares a checkpoint with the limits of an engine, `expected` computes the digests that
an engine should report, `reference` the answers that it should give, `exporting` converts adapters,
`follow` and `publisher` publish the checkpoints of a run when they are committed. Nothing here
sends tensors or pickles: servers get paths and names.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
