"""Running inference servers: publish a committed checkpoint into them and prove that they hold it.

Begin at `publish`. `options` has its options, `client` is the HTTP client, `servers` has the
endpoints of vLLM and SGLang, `preflight` compares a checkpoint with the limits of an engine,
`expected` computes the digests that an engine should report, `reference` the answers that it should
give, `export` converts adapters, `follow` publishes the checkpoints of a run when they are
committed. Nothing here sends tensors or pickles: servers get paths and names.
"""
