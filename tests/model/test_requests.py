"""How much is asked of a bucket, and nothing of a local disk: a request is what time and money go
by there.
"""

from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import models
import pytest
import torch
from buckets import in_bucket, new_bucket
from small_checkpoints import make_checkpoint, save

import ft_ckpt
from ft_ckpt import CheckpointSaver
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME, manifest_to_json
from ft_ckpt.extensions.buckets import object_store
from ft_ckpt.storage.io import prefetch
from ft_ckpt.storage.places import Place

SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


@pytest.fixture
def asked(s3):
    """A context whose counter has the requests of its block, by kind."""

    @contextmanager
    def counting():
        found, before = Counter(), len(s3.requests)
        yield found
        found.update(
            "LIST" if "list-type" in each.query else each.method for each in s3.requests[before:]
        )

    return counting


@pytest.fixture
def there():
    """The place of a copy in the server's bucket."""
    return lambda path: in_bucket(path, ft_ckpt.open_place("s3://bucket/runs").folder)


def test_a_model_is_a_listing_and_a_request_for_each_file(s3, asked, there, tmp_path):
    CheckpointSaver(tokenizer=models.tokenizer(), max_shard_size="2MB").save(
        models.build("wide"), tmp_path / "out"
    )
    place = there(tmp_path / "out")
    shards = list((tmp_path / "out").glob("*.safetensors"))
    with asked() as found:
        ft_ckpt.load_model(place)
    index = int(len(shards) > 1)
    small = 1 + index + len(SMALL_FILES)
    assert (found["LIST"], found["HEAD"] <= 3) == (1, True), "HEADs are of the manifest alone"
    assert found["GET"] <= small + 2 * len(shards), (
        "the table of a weight file comes with its opening"
    )
    assert (found["PUT"], found["POST"], found.total() - found["GET"]) == (1, 1, 6), (
        "a lease, and its end"
    )


def test_weights_come_in_large_ranges_and_touch_no_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(prefetch, "_REMOTE_BLOCK_BYTES", 1 << 20)  # 16 MB as a rule
    model, again = (
        torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(20))) for _ in range(2)
    )
    CheckpointSaver().save(model, tmp_path / "out")
    place, sizes, real = in_bucket(tmp_path / "out"), [], object_store.obstore.get

    def get(client, key, *, options=None):
        sizes.append((key, options["range"][1] - options["range"][0]))
        return real(client, key, options=options)

    monkeypatch.setattr(object_store.obstore, "get", get)
    before = _written_bytes()
    assert torch.equal(ft_ckpt.load_model(place, into=again)[3].weight, model[3].weight)
    assert _written_bytes() - before < 100_000, "of a model of 5 MB"
    ranges = [size for key, size in sizes if key.endswith("model.safetensors")]
    assert len(ranges) == 1 + 6, "its first bytes, and each megabyte once, for 40 tensors"
    assert sum(ranges) < 1.1 * sum(each.numel() * 4 for each in model.parameters()) + (1 << 18)


def _written_bytes():
    """What this process has written, to a disk or anywhere."""
    told = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(told["wchar"])


def test_the_latest_of_a_hundred_is_one_listing_and_their_manifests(asked, tmp_path):
    run = ft_ckpt.open_place("s3://bucket/runs/sft").folder
    for step in range(1, 101):
        manifest = make_checkpoint(tmp_path / f"{step}", step=step)
        run.write(f"checkpoint-{step}/{MANIFEST_NAME}", manifest_to_json(manifest).encode())
    for each in (tmp_path / "100").iterdir():
        run.write(f"checkpoint-100/{each.name}", each.read_bytes())
    with asked() as found:
        assert ft_ckpt.latest("s3://bucket/runs/sft") == "s3://bucket/runs/sft/checkpoint-100"
    assert found == {"LIST": 2, "HEAD": 1, "GET": 1 + 100 + 3}, (
        "the newest is verified: manifest, weights, config"
    )


def test_verifying_reads_each_file_once(asked, there, tmp_path):
    save(tmp_path / "out", shards=2, parts=("", "policy"))
    place = there(tmp_path / "out")
    files = [each for each in (tmp_path / "out").rglob("*") if each.is_file()]
    with asked() as found:
        assert ft_ckpt.verify(place).ok
    assert found == {"LIST": 1, "HEAD": 1, "GET": len(files)}


def test_a_lazy_file_is_a_request_and_each_large_tensor_one_more(asked, there, tmp_path):
    ft_ckpt.save(
        {"w": torch.arange(500_000.0), "v": torch.ones(200_000), "b": torch.ones(4)},
        tmp_path / "x.h5",
    )
    place = there(tmp_path / "x.h5")
    with asked() as found:
        lazy = ft_ckpt.load(place)
        assert float(lazy["b"].sum()) == 4
    opened = found["GET"]
    assert opened <= 2, "its table is at the end"
    with asked() as found:
        assert float(lazy["w"][-1]) == 499_999
        assert float(lazy["v"].sum()) == 200_000
    assert found["GET"] <= 2
    assert set(found) == {"GET"}


def test_an_object_of_no_bytes_is_opened(s3):
    for bucket in (ft_ckpt.open_place("s3://bucket/none").folder, new_bucket()):
        bucket.write("x", b"")
        assert bucket.open("x").size_bytes == 0
        assert Place(bucket, "x").open().version
