"""What a thousand ranks ask of a bucket for a large run, worked out by the functions that plan it;
nothing is moved.

A model of 70 billion parameters: 140 GB of weights, and 420 GB of state. The bound is what one
prefix answers in ten seconds: 3,500 requests that write and 5,500 that read a second.
"""

import pytest
import torch
from simulated_ranks import planned
from training import begin, go_on

from ft_ckpt.extensions.buckets.uploads import size_of_parts
from ft_ckpt.saving.planning.write_plan import assign_writers
from ft_ckpt.storage.io import ByteRun, prefetch

RANKS, SHARD_BYTES = 1024, 50_000_000_000  # as max_shard_size is unless told otherwise
WRITES, READS = 3_500 * 10, 5_500 * 10


class FarFile:
    """An open object of a bucket, as far as planning asks."""

    can_map = False


def llama_70b(*dtypes):
    """Its parameters on the meta device, each in as many dtypes."""
    hidden, inner, kv = 8192, 28672, 1024
    sizes = {
        **dict.fromkeys(("self_attn.q_proj", "self_attn.o_proj"), (hidden, hidden)),
        **dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (kv, hidden)),
        **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (inner, hidden)),
        "mlp.down_proj": (hidden, inner),
        **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (hidden,)),
    }
    shapes = {
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(80)
        for name, shape in sizes.items()
    }
    shapes |= {"model.embed_tokens.weight": (128256, hidden), "lm_head.weight": (128256, hidden)}
    shapes["model.norm.weight"] = (hidden,)
    return {
        f"{name}/{number}": torch.empty(shape, dtype=dtype, device="meta")
        for name, shape in shapes.items()
        for number, dtype in enumerate(dtypes)
    }


@pytest.fixture(scope="module")
def files():
    """The files of weights and of state: two moments, one of them exact."""
    parts = [llama_70b(torch.bfloat16), llama_70b(torch.float32, torch.bfloat16)]
    return [
        file
        for values in parts
        for file in planned(values, "fsdp2", RANKS, 0, shard=SHARD_BYTES).files
    ]


def test_requests_that_write(files):
    sizes = [file.layout.size_bytes for file in files]
    assert 550e9 < sum(sizes) < 570e9
    assert len(set(assign_writers(files, RANKS))) == len(files), "each file has a rank of its own"
    # and the begin and the end of each upload
    asked = sum(-(-size // size_of_parts(size)) + 2 for size in sizes)
    assert asked + 100 < WRITES, "beside the mark, the manifest and small files"


def test_requests_that_read(files, s3):
    """Rank 0 reads the tensors, of which each rank has small ranges; what each rank opens is seen
    in a real resume.
    """
    asked = 0
    for layout in (file.layout for file in files):
        far = FarFile()
        runs = [
            ByteRun(s.name, far, at, s.size_bytes)
            for s, at in zip(layout.specs, layout.starts, strict=True)
        ]
        asked += sum(1 for _ in prefetch._block_reads(runs, prefetch.block_size(far)))
    begin("s3://bucket/run", 4)
    before = s3.request_count
    go_on("s3://bucket/run")
    looked = [
        each
        for each in s3.requests[before:]
        if each.method in ("GET", "HEAD") and "checkpoint-4/" in each.line
    ]
    # There the first bytes of a file are all of it. Here manifest and document are larger, and what
    # a rank has of its own, a few arrays of random numbers, lies deep in one file; weights are
    # opened by rank 0 alone.
    further = 2 + 3
    assert asked + len(files) + RANKS * (len(looked) + further) < READS, (asked, len(looked))
