"""Running inference servers: publish a committed checkpoint into them and prove that they hold it.

Begin at `publish`. `client` speaks HTTP, `servers` knows the calls of vLLM and of SGLang, `preflight` compares a
checkpoint with the limits of an engine, `expected` computes the digests that an engine should report, `export` converts
adapters, `follow` publishes the checkpoints of a run as they come, `foreign` reads chains of deltas that TRL wrote.
Nothing here sends a tensor, or anything pickled: servers get paths and names.
"""
