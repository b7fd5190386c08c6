"""Reinforcement learning. Each subpackage has its own front.

| subpackage | holds |
|---|---|
| `publishing` | loads a committed checkpoint into inference servers and proves that they hold it |
| `limits` | the tensors and settings that an engine refuses or misreads; conversion of adapters |
| `engines` | inference servers: HTTP client, vLLM, SGLang, expected digests and answers |
| `deltas` | chains of checkpoints that hold only the elements that changed |
| `writers` | processes that add a part to each checkpoint of a run |
| `samples` | the data position of asynchronous training |

Nothing here sends tensors or pickles. Servers get paths and names. Begin at
`publishing.steps`, `writers.writer` or `samples.frontier`.
"""
