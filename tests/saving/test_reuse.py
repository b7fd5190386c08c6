"""Frozen tensors are written once: later checkpoints link to the file, and each is whole without
the others.
"""

import errno
import os
import shutil

import faults
import models
import pytest
import torch
import torch.distributed as dist
from compare import assert_same_tensors, reference, stored
from on_ranks import RANK, on_ranks
from transformers import AutoModelForCausalLM
from wrappers import WRAPPERS, truth

from ft_ckpt import CheckpointSaver, Every, Keep, SaverConfig, load_model, verify
from ft_ckpt.checkpoint.catalog import discover
from ft_ckpt.checkpoint.commit import delete_checkpoint
from ft_ckpt.checkpoint.manifest import read_manifest
from ft_ckpt.errors import NoSpaceError
from ft_ckpt.saving import space, write
from ft_ckpt.saving.planning import files
from ft_ckpt.storage.places import open_place

FROZEN, TRAINED = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def model():
    """A model of some 7 MB of which the last layer norm is trained."""
    return frozen_but(models.build("wide"))


def frozen_but(model, *trained):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in (trained or ("model.norm.weight",)))
    return model


def step(model, by=1.0):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(by)


def twice(model, folder, change=step, **settings):
    """Two checkpoints with a `change` between; the folder of the second."""
    with CheckpointSaver(None, folder, **{"reuse_frozen": "on", **settings}) as saver:
        saver.save(model, step=1, adapter_only=False)
        change(model)
        return saver.save(model, step=2, adapter_only=False).path


def is_linked(path, file=FROZEN):
    records = {record.path: record for record in read_manifest(open_place(path)).files}
    assert ((path / file).stat().st_nlink > 1) == records[file].linked
    return records[file].linked


def assert_is(path, model, folder):
    """The checkpoint is whole by itself and holds the model."""
    assert verify(path).ok, verify(path)
    assert_same_tensors(stored(path), reference(model, folder))
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    assert_same_tensors(loaded.state_dict(), model.state_dict())


def test_only_what_changed_is_written(model, tmp_path):
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    with CheckpointSaver(None, tmp_path, reuse_frozen="on") as saver:
        with faults.writes() as first:
            saver.save(model, step=1)
        step(model)
        with faults.writes() as second:
            path = saver.save(model, step=2).path
    assert sum(first) > 6_000_000
    assert sum(second) < trained + 50_000
    assert is_linked(path)
    assert not is_linked(path, TRAINED)
    assert_is(path, model, tmp_path / "reference")
    loaded = load_model(path)
    assert_same_tensors(loaded.state_dict(), model.state_dict())


def test_each_is_whole_without_the_other(model, tmp_path):
    path = twice(model, tmp_path)
    assert delete_checkpoint(tmp_path / "checkpoint-1").dropped
    assert_is(path, model, tmp_path / "reference")
    assert not is_linked_still(path)


def is_linked_still(path):
    return (path / FROZEN).stat().st_nlink > 1


def frozen_weight(model):
    return model.model.layers[1].mlp.up_proj.weight


def write_in_place(model):
    with torch.no_grad():
        frozen_weight(model)[0, 0] += 1


def load_states(model):
    model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()})


def new_parameter(model):
    other = torch.nn.Parameter(frozen_weight(model) * 2, requires_grad=False)
    model.model.layers[1].mlp.up_proj.weight = other


def new_data(model):
    frozen_weight(model).data = frozen_weight(model).detach() * 2


def thaw(model):
    frozen_weight(model).requires_grad_(True)


def write_a_few_rows_past_the_counters(model):
    model.model.embed_tokens.weight.data[[3, 50]] = 0.5


def write_past_the_counters(model):
    frozen_weight(model).data[5, 7] += 1


def train_for_a_while(model, fused=False):
    """Thawed, trained in a few rows, and frozen again."""
    embedding = model.model.embed_tokens.weight.requires_grad_(True)
    embedding.grad = torch.zeros_like(embedding)
    embedding.grad[40:42] = 1
    torch.optim.AdamW([embedding], fused=fused, weight_decay=0).step()
    embedding.grad = None
    embedding.requires_grad_(False)


def train_fused_for_a_while(model):
    """Such an optimizer moves no version counter."""
    train_for_a_while(model, fused=True)


CHANGES = [
    *(write_in_place, load_states, new_parameter, new_data, thaw),
    *(
        write_past_the_counters,
        write_a_few_rows_past_the_counters,
        train_for_a_while,
        train_fused_for_a_while,
    ),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(model, tmp_path, change):
    path = twice(model, tmp_path, change)
    assert change is thaw or not is_linked(path)
    assert_is(path, model, tmp_path / "reference")


def test_what_is_written_after_the_call_is_not_in_it(model, tmp_path):
    with CheckpointSaver(None, tmp_path, reuse_frozen="on", background=True) as saver:
        saver.save(model, step=1)
        handle = saver.save(model, step=2)
        write_past_the_counters(model)
        assert is_linked(handle.result().path)
        assert not is_linked(saver.save(model, step=3).result().path)


def test_changed_and_changed_back(model, tmp_path):
    with CheckpointSaver(None, tmp_path, reuse_frozen="on") as saver:
        links, row = [], frozen_weight(model).data[0].clone()
        for number, values in enumerate((row, row + 1, row)):
            frozen_weight(model).data[0] = values
            links.append(is_linked(saver.save(model, step=number).path))
    assert links == [False, False, True]


def test_two_models_saved_in_turns(model, tmp_path):
    other = frozen_but(models.build("wide", seed=5))
    with CheckpointSaver(None, tmp_path, reuse_frozen="on") as saver:
        for number in (1, 2):
            for name, one in (("policy", model), ("critic", other)):
                path = saver.save(one, tmp_path / f"{name}-{number}").path
                assert is_linked(path) == (number == 2)
                assert_is(path, one, tmp_path / "reference" / path.name)


def test_tensors_made_for_inference(tmp_path):
    with torch.inference_mode():
        model = frozen_but(models.build("wide"))
    assert is_linked(twice(model, tmp_path, lambda model: None))


def test_in_another_dtype(model, tmp_path):
    path = twice(model, tmp_path, dtype="bfloat16")
    assert is_linked(path)
    assert {tensor.dtype for tensor in stored(path).values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    "odd", [torch.tensor(1.0), torch.zeros(0, 3), torch.ones(1), torch.ones(4, 6).t()]
)
def test_tensors_of_any_form(odd, tmp_path):
    model = torch.nn.Module()
    model.odd = torch.nn.Parameter(odd, requires_grad=False)
    model.flags = torch.nn.Parameter(torch.ones(5, dtype=torch.bool), requires_grad=False)
    model.small = torch.nn.Parameter(torch.ones(5).to(torch.float8_e4m3fn), requires_grad=False)
    model.trained = torch.nn.Parameter(torch.ones(3))
    path = twice(model, tmp_path)
    assert is_linked(path)
    assert verify(path).ok
    assert torch.equal(stored(path)["odd"], odd)


def test_experts_that_are_stored_otherwise(tmp_path):
    model = frozen_but(models.build("mixtral"))
    path = twice(model, tmp_path)
    assert is_linked(path)
    assert_same_tensors(stored(path), reference(model, tmp_path / "reference"))


def test_shards_of_either_kind(model, tmp_path):
    frozen_but(model, "model.norm.weight", "model.embed_tokens.weight")
    path = twice(model, tmp_path, max_shard_size="2MB")
    linked = [record.path for record in read_manifest(open_place(path)).files if record.linked]
    names = sorted(file.name for file in path.glob("*.safetensors"))
    assert len(linked) >= 2
    assert len(names) > len(linked)
    assert names[-1] == f"model-{len(names):05d}-of-{len(names):05d}.safetensors"
    assert_is(path, model, tmp_path / "reference")


def test_base_of_adapters_is_one_file_and_linked(tmp_path):
    path = twice(models.build("lora_wide"), tmp_path, reuse_frozen="on")
    assert is_linked(path, "model.safetensors")
    assert not is_linked(path, "adapters/default/adapter_model.safetensors")
    assert verify(path).ok


def test_small_models_stay_one_file(model, tmp_path):
    path = twice(model, tmp_path, reuse_frozen="auto")
    reference(model, tmp_path / "reference")
    same = (path / "model.safetensors").read_bytes() == (
        tmp_path / "reference" / "model.safetensors"
    ).read_bytes()
    assert same
    assert not any(record.linked for record in read_manifest(open_place(path)).files)


def test_auto_pays_from_a_size_on(model, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MIN_FROZEN_BYTES", 1 << 20)
    assert is_linked(twice(model, tmp_path / "most", reuse_frozen="auto"))
    trained = [name for name, _ in model.named_parameters() if "layers.0.mlp" not in name]
    path = twice(frozen_but(model, *trained), tmp_path / "few", reuse_frozen="auto")
    assert (path / "model.safetensors").exists()


def test_off_and_other_formats(model, tmp_path):
    assert (twice(model, tmp_path / "off", reuse_frozen="off") / "model.safetensors").exists()
    assert (twice(model, tmp_path / "h5", format="h5") / "model.h5").exists()
    with pytest.raises(ValueError, match="reuse_frozen"):
        SaverConfig(reuse_frozen="sometimes")


@pytest.mark.parametrize("code", [errno.EPERM, errno.EXDEV, errno.EMLINK])
def test_written_where_there_are_no_links(model, tmp_path, monkeypatch, code):
    def refuse(*_, **__):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    path = twice(model, tmp_path)
    assert not is_linked(path)
    assert verify(path).ok


@pytest.mark.parametrize("limit", [2, 3])
def test_copied_at_the_limit_of_links(model, tmp_path, monkeypatch, limit):
    """As on GlusterFS after 100 checkpoints: a save goes on, and the next ones link to the copy."""
    link = os.link

    def limited(origin, goal, **options):
        if origin.stat().st_nlink >= limit:
            raise OSError(errno.EMLINK, os.strerror(errno.EMLINK))
        link(origin, goal, **options)

    monkeypatch.setattr(os, "link", limited)
    links = []
    with CheckpointSaver(None, tmp_path, reuse_frozen="on") as saver:
        for number in range(1, 7):
            step(model)
            path = saver.save(model, step=number).path
            assert_is(path, model, tmp_path)
            links.append(read_manifest(open_place(path)).files)
    linked = [next(each.linked for each in files if each.path == FROZEN) for files in links]
    assert sum(linked) == (0 if limit == 2 else 3)


def damage(file):
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


def shorten(file):
    os.truncate(file, 1000)


def to_a_link(file):
    file.rename(file.with_name("elsewhere"))
    file.symlink_to("elsewhere")


@pytest.mark.parametrize("change", [damage, shorten, to_a_link, os.unlink])
def test_a_damaged_file_is_not_taken(model, tmp_path, change):
    path = twice(model, tmp_path, lambda model: change(tmp_path / "checkpoint-1" / FROZEN))
    assert not is_linked(path)
    assert_is(path, model, tmp_path / "reference")


def test_a_damaged_manifest_offers_nothing(model, tmp_path):
    path = twice(
        model, tmp_path, lambda model: (tmp_path / "checkpoint-1" / "ft_ckpt.json").write_text("{")
    )
    assert not is_linked(path)
    assert verify(path).ok


def test_what_is_gone_is_written(model, tmp_path):
    path = twice(model, tmp_path, lambda model: shutil.rmtree(tmp_path / "checkpoint-1"))
    assert not is_linked(path)
    assert_is(path, model, tmp_path / "reference")


def test_the_same_step_again(model, tmp_path):
    with CheckpointSaver(None, tmp_path, reuse_frozen="on") as saver:
        for _ in range(3):
            step(model)
            path = saver.save(model, step=1).path
    assert [
        record.linked for record in read_manifest(open_place(path)).files if record.path == FROZEN
    ] == [True]
    assert not is_linked_still(path)  # the others are gone
    assert_is(path, model, tmp_path / "reference")


def test_in_a_run_with_retention(model, tmp_path):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with CheckpointSaver(
        None, tmp_path, reuse_frozen="on", every=Every(steps=1), keep=Keep(last=2)
    ) as saver:
        saver.register(model=model, optimizer=optimizer)
        for number in range(1, 5):
            step(model)
            saver.step(step=number)
    kept = [info.path for info in discover(open_place(tmp_path))]
    assert [path.name for path in kept] == ["checkpoint-3", "checkpoint-4"]
    assert all(is_linked(path) and verify(path).ok for path in kept)
    assert_is(kept[-1], model, tmp_path / "reference")


def test_in_the_background(model, tmp_path):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with CheckpointSaver(None, tmp_path, reuse_frozen="on", background=True) as saver:
        saver.register(model=model, optimizer=optimizer)
        saver.save(model, step=1)
        saver.wait()
        step(model)
        with faults.writes() as written:
            path = saver.save(model, step=2).path
            saver.wait()
    assert sum(written) < 50_000
    assert is_linked(path)
    assert_is(path, model, tmp_path / "reference")


def test_a_given_state_dict_is_written(model, tmp_path):
    with CheckpointSaver(None, tmp_path, reuse_frozen="on") as saver:
        saver.save(model, step=1)
        given = {name: tensor + 1 for name, tensor in model.state_dict().items()}
        path = saver.save(model, step=2, state_dict=given).path
        assert_same_tensors(stored(path), given)
        path = saver.save(model, step=3).path
    assert_is(path, model, tmp_path / "reference")


def test_links_need_no_room(model, tmp_path, monkeypatch):
    needed = []
    monkeypatch.setattr(space, "ensure_space", lambda target, size, *_, **__: needed.append(size))
    twice(model, tmp_path)
    assert needed[0] - needed[1] > 6_000_000


def test_a_frozen_file_that_changed_needs_room_at_the_next_try(model, tmp_path, monkeypatch):
    """The disk fills up while the changed file is written: the next try knows that it is no
    link.
    """
    needed, real = [], write.write_file

    def full_once(*given):
        if len(needed) == 2:
            raise NoSpaceError("full")
        return real(*given)

    monkeypatch.setattr(space, "ensure_space", lambda target, size, *_, **__: needed.append(size))
    monkeypatch.setattr(write, "write_file", full_once)
    path = twice(model, tmp_path, write_in_place, when_full="wait")
    assert needed[0] - needed[1] > 6_000_000
    assert needed[2] == needed[0]
    assert_is(path, model, tmp_path / "reference")


def test_another_folder_gets_files_of_its_own(model, tmp_path):
    with CheckpointSaver(None, tmp_path / "run", reuse_frozen="on") as saver:
        saver.save(model, step=1)
        path = saver.save(model, tmp_path / "export" / "model").path
    assert not is_linked(path)
    assert verify(path).ok


def run_of(model, folder, **settings):
    saver = CheckpointSaver(None, folder, reuse_frozen="on", on_difference="ignore", **settings)
    saver.register(
        model=model,
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
    )
    return saver


def resumed(folder, change=step, **settings):
    """The checkpoint after one that was made by another run of the same model."""
    first = frozen_but(models.build("wide"))
    run_of(first, folder).save_state(path=folder / "checkpoint-1")
    model = frozen_but(models.build("wide", seed=5))
    with run_of(model, folder, **settings) as saver:
        saver.resume("must")
        change(model)
        path = saver.save_state(path=folder / "checkpoint-2").path
    assert_is(path, model, folder / "reference")
    return path


@pytest.mark.parametrize("compared", [False, True])
def test_after_a_resume(tmp_path, compared):
    path = resumed(tmp_path, verify_resume=compared)
    assert is_linked(path)
    assert stored(path)["model.norm.weight"].mean() > 0.5


def test_in_another_process(model, tmp_path):
    def first():
        CheckpointSaver(None, tmp_path, reuse_frozen="on").save(model, step=1)

    assert faults.in_child(first) == ""
    step(model)
    path = CheckpointSaver(None, tmp_path, reuse_frozen="on").save(model, step=2).path
    assert is_linked(path)
    assert_is(path, model, tmp_path / "reference")


@pytest.mark.parametrize("change", [write_past_the_counters, new_parameter])
def test_a_change_after_a_resume_is_seen(tmp_path, change):
    assert not is_linked(resumed(tmp_path, change))


@pytest.mark.slow
def test_killed_in_the_middle(model, tmp_path):
    """Killed mid-save, the newest folder is half-written."""

    def save(folder):
        with CheckpointSaver(None, folder, reuse_frozen="on") as saver:
            saver.save(model, step=1)
            step(model)
            saver.save(model, step=2)

    def trial(world):
        folder = tmp_path / world.name
        world.run(save, folder)
        for info in discover(open_place(folder)):
            assert verify(info.path).ok
        assert world.is_met or is_linked(folder / "checkpoint-2")

    faults.try_worlds(trial, faults.Disk("killed"), every=3)


def frozen_under(wrapper):
    torch.compiler.set_stance("force_eager")
    model = models.build("wide")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("norm.weight"))
    return WRAPPERS[wrapper](model)


def saver_on_ranks(live, folder, each):
    settings = {"enter_timeout_seconds": 60, "io_threads": 2, "each_rank_writes": each}
    return CheckpointSaver(live.accelerator, folder, reuse_frozen="on", **settings)


def assert_all_are(path, live):
    expected = truth(live)
    dist.barrier()
    if RANK == 0:
        assert verify(path).ok, verify(path)
        found = stored(path)
        assert_same_tensors(
            found, {name: tensor for name, tensor in expected.items() if name in found}
        )
        assert expected.keys() >= found.keys()
    dist.barrier()


@pytest.mark.sample("on-ddp", "off-fsdp2")
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2", "fsdp1", "zero3"])
@pytest.mark.parametrize("each", ["off", "on"])
@on_ranks(2)
def test_ranks_write_only_what_has_changed(tmp_path, wrapper, each):
    live = frozen_under(wrapper)
    saver = saver_on_ranks(live, tmp_path, each)
    live.step(models.batch(seed=RANK))
    saver.save(live.model, step=1)
    live.step(models.batch(seed=RANK + 2))
    with faults.writes() as written:
        path = saver.save(live.model, step=2).path
    assert sum(written) < 50_000
    assert is_linked(path)
    assert_all_are(path, live)
    with torch.no_grad():
        for parameter in live.model.parameters():
            getattr(parameter, "ds_tensor", parameter).mul_(2)  # ZeRO-3's shard
    path = saver.save(live.model, step=3).path
    assert not is_linked(path)
    assert_all_are(path, live)
    if each == "on" and wrapper != "zero3":
        assert is_linked(saver.save(live.model, step=4, background=True).result().path)


@on_ranks(2)
def test_a_change_that_one_rank_sees(tmp_path):
    """A change that only one rank sees makes all write the file; the next save reuses it again."""
    live = frozen_under("fsdp2")
    saver = saver_on_ranks(live, tmp_path, "on")
    saver.save(live.model, step=1)
    if RANK == 1:
        parameter = next(p for p in live.model.parameters() if not p.requires_grad)
        with torch.no_grad():
            parameter.to_local().mul_(3)
    path = saver.save(live.model, step=2).path
    assert not is_linked(path)
    assert_all_are(path, live)
    path = saver.save(live.model, step=3).path
    assert is_linked(path)
    assert_all_are(path, live)


@pytest.mark.slow
@on_ranks(2)
def test_files_of_other_writers(tmp_path):
    """Rank 0 does not compare files that all ranks wrote, nor all ranks those of rank 0: tensors
    would have to move.
    """
    live = frozen_under("fsdp2")
    rank_0, all_ranks = saver_on_ranks(live, tmp_path, "off"), saver_on_ranks(live, tmp_path, "on")
    with rank_0, all_ranks:
        assert not is_linked(rank_0.save(live.model, step=1).path)
        assert not is_linked(all_ranks.save(live.model, step=2).path)
        assert is_linked(all_ranks.save(live.model, step=3, background=True).result().path)
        path = rank_0.save(live.model, step=4).path
        assert is_linked(path)
        assert_all_are(path, live)
