"""A disk that fails at any one call of a save: the error is ours, the older one whole, and nothing
left after the next.

And at any one call of a read: what comes out is the right values, or one of our errors.

By default one fault of each of two saves, which FT_CKPT_SEED chooses; the slow tests try all.
"""

import json
import logging
import random
import shutil
import warnings
from functools import partial

import models
import pytest
import torch
from faults import try_worlds
from faulty_nodes import SaverNotMadeError, on_two_nodes
from preloaded import REFUSED, Preloaded, System
from seeds import chosen_seed, examples
from small_checkpoints import contents
from torch import nn

import ft_ckpt
from ft_ckpt import CheckpointSaver, Keep, verify
from ft_ckpt.checkpoint.catalog import discover
from ft_ckpt.checkpoint.checks import problems
from ft_ckpt.checkpoint.leases import pin, pin_reason
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME, read_manifest
from ft_ckpt.errors import CheckpointError, ManifestError, TargetError
from ft_ckpt.runs.folder import prune_run
from ft_ckpt.storage.places import open_place

FAULTS = (
    *("ENOSPC", "EDQUOT", "EIO", "EINTR", "EMFILE", "ESTALE", "ENOTCONN", "EACCES", "EROFS"),
    "short",
)
LASTING = ("ENOSPC and on", "EIO and on", "ENOTCONN and on", "EROFS and on")
LASTING_OF_READS = ("EMFILE and on", "EIO and on", "ESTALE and on", "ENOTCONN and on")


@pytest.fixture(scope="module")
def preloaded(shim):
    process = Preloaded(shim, __file__)
    yield process
    process.close()


# Saves: what each does in a folder with a value, in the preloaded process


def state(value):
    return {
        "a": torch.full((300, 50), float(value)),
        "b": torch.full((7,), float(value)),
        "step": int(value),
    }


def full(folder, value):
    with CheckpointSaver(max_shard_size=20_000) as saver:
        saver.save(
            models.llama() if value else models.Two(1.0), folder / "out", step=value, tokenizer=None
        )


def hdf5(folder, value):
    with CheckpointSaver(format="h5", compression="gzip" if value % 2 else None) as saver:
        saver.save(models.Two(value), folder / "out", step=value)


def background(folder, value):
    with CheckpointSaver(background=True) as saver:
        saver.save(models.Two(value), folder / "out", step=value).result()


def direct(folder, value, faulty_rank=0):
    """Two ranks that each write their share."""

    def save_share():
        with CheckpointSaver(each_rank_writes="on") as saver:
            saver.save(
                nn.parallel.DistributedDataParallel(models.Two(value)), folder / "out", step=value
            )

    on_two_nodes(save_share, faulty_rank)


def file_of(suffix, **options):
    def one_file(folder, value):
        ft_ckpt.save(state(value), folder / f"out{suffix}", **options)

    return one_file


def convert(kind, name):
    def converted(folder, value):
        source = folder.parent / "source"
        if not value:
            full(source, 1)
        ft_ckpt.convert(source / "out", folder / name, format=kind)

    return converted


def prune(folder, value):
    if not value:
        with CheckpointSaver() as saver:
            for step in (3, 4, 5):
                saver.save(models.Two(step), folder / f"checkpoint-{step}", step=step)
        (folder / "checkpoint-3" / "notes.txt").write_text("mine")
    else:
        for problem in prune_run(open_place(folder), Keep(last=1)).problems:
            raise TargetError(problem)


def pinning(folder, value):
    if not value:
        full(folder, 1)
    pin(open_place(folder / "out"), f"reason {value}")


SAVES = {
    "full": full,
    "h5": hdf5,
    "background": background,
    "direct": direct,
    "direct, on rank 1": partial(direct, faulty_rank=1),
    "prune": prune,
    "pin": pinning,
    ".safetensors": file_of(".safetensors"),
    ".pt": file_of(".pt"),
    ".h5 compressed": file_of(".h5", compression="gzip"),
    "convert to h5": convert("h5", "converted"),
    "convert to a file": convert("safetensors", "one.safetensors"),
}
WITH_STEP = ("full", "h5", "background", "direct", "direct, on rank 1")


def prepare_save(folder, case):
    """The older checkpoint or file, and foreign files beside and inside it."""
    folder.mkdir()
    (folder / "mine.txt").write_text("mine")
    SAVES[case](folder, 0)
    if (folder / "out").is_dir():
        (folder / "out" / "notes.txt").write_text("mine")


def save(folder, case, value):
    SAVES[case](folder, value)


def check_whole(folder, case, *, may_hide=False):
    """Nothing is damaged or lost; with `may_hide`, a foreign file may be in a hidden folder until
    the next save.
    """
    inside = [folder / "out" / "notes.txt", folder / "checkpoint-3" / "notes.txt"]
    for path in [folder / "mine.txt", *(path for path in inside if path.parent.is_dir())]:
        hidden = (
            [stage / path.name for stage in folder.glob(".*.ft_ckpt-stage-*")] if may_hide else []
        )
        assert any(place.is_file() and place.read_text() == "mine" for place in (path, *hidden)), (
            f"{path}: lost"
        )
    for checkpoint in ("out", "checkpoint-5"):
        if (folder / checkpoint).is_dir():
            assert verify(folder / checkpoint).problems == ()
    for path in folder.glob("out.*"):
        tensors = ft_ckpt.load(path, map_location="cpu")
        assert all(bool((tensors[name] == float(tensors["step"])).all()) for name in "ab"), (
            f"{path}: mixed"
        )


def check_save(preloaded, folder, case, world, ended):
    """What holds after a save in any world: the older one or the new one is whole, and the next
    save works.
    """
    assert ended.is_right, ended
    assert not ended.text or "out" in ended.text or str(folder) in ended.text, (
        f"names nothing: {ended}"
    )
    check_whole(folder, case, may_hide=True)
    again = preloaded.run(save, folder, case, 2)
    assert again.status == 0, (ended, again)
    check_whole(folder, case)
    if case == "pin":
        assert "reason 2" in str(pin_reason(open_place(folder / "out")))
    if case in WITH_STEP:
        assert read_manifest(open_place(folder / "out")).step == 2


def campaign(preloaded, root, case, max_worlds=0):
    origin = root / "origin"
    assert preloaded.run(prepare_save, origin, case).status == 0
    expected = []

    def trial(world):
        folder = shutil.copytree(origin, root / world.name, symlinks=True)
        ended = world.run(save, folder, case, 1)
        check_save(preloaded, folder, case, world, ended)
        if not world.fault:
            assert ended.status == 0, ended
            expected.extend(sorted(contents(folder)))
        assert sorted(contents(folder)) == expected, ended
        shutil.rmtree(folder)

    try_worlds(trial, System(preloaded, *FAULTS, *LASTING), max_worlds=max_worlds)


@pytest.mark.parametrize("case", ["full", "prune", "direct, on rank 1"])
def test_a_fault_of_a_save(preloaded, tmp_path, case):
    campaign(preloaded, tmp_path, case, 1)


@pytest.mark.slow
@pytest.mark.parametrize("case", SAVES)
def test_every_fault(preloaded, tmp_path, case):
    campaign(preloaded, tmp_path, case)


# Reads


def prepare_reads(folder):
    """A run of two checkpoints, an adapter, and a file of each format."""
    folder.mkdir()
    model, optimizer = fresh()
    with CheckpointSaver(None, folder / "run", every=1, max_shard_size=20_000) as saver:
        saver.register(model=model, optimizer=optimizer)
        for step in (1, 2):
            model(**models.batch(step)).loss.backward()
            optimizer.step()
            saver.step()
    with CheckpointSaver() as saver:
        saver.save(models.lora(), folder / "adapter", adapter_only=True)
    for suffix in (".safetensors", ".pt", ".h5"):
        ft_ckpt.save(state(3), folder / f"out{suffix}")
    ft_ckpt.save(state(3), folder / "packed.h5", compression="gzip")


def fresh():
    model = models.llama()
    return model, torch.optim.AdamW(model.parameters())


def said_of(value):
    """A text for a value: equal texts for equal tensors."""
    if isinstance(value, torch.Tensor):
        numbers = value.double()
        total, squares = numbers.sum().item(), numbers.square().sum().item()
        return f"{value.dtype}{tuple(value.shape)}{total!r}{squares!r}"
    if isinstance(value, dict):
        return str({key: said_of(item) for key, item in value.items()})
    return (
        str([said_of(item) for item in value]) if isinstance(value, (list, tuple)) else repr(value)
    )


def read_model(folder, **options):
    return ft_ckpt.load_model(folder / "run/checkpoint-2", **options).state_dict()


def read_adapter(folder):
    return ft_ckpt.load_model(
        folder / "adapter", base=models.llama(), check_base=False
    ).state_dict()


def read_run(folder):
    return resumed(CheckpointSaver(None, folder / "run"))


def resumed(saver):
    model, optimizer = fresh()
    with saver:
        saver.register(model=model, optimizer=optimizer)
        progress = saver.resume()
        return [progress.step, model.state_dict(), optimizer.state_dict()["state"]]


def read_run_on_two_nodes(folder, faulty_rank):
    def act():
        try:
            saver = CheckpointSaver(None, folder / "run")
        except CheckpointError as error:
            raise SaverNotMadeError(error) from error
        return said_of(resumed(saver))

    return on_two_nodes(act, faulty_rank)


def read_verdict(folder):
    """Problems are an answer, as an error is."""
    for problem in verify(folder / "run/checkpoint-2").problems:
        raise CheckpointError(problem)


def read_latest(folder):
    return str(ft_ckpt.latest(folder / "run"))


def read_steps(folder):
    return [info.manifest.step for info in discover(open_place(folder / "run"))]


def read_file(name, folder, **options):
    return dict(ft_ckpt.load(folder / name, **options))


def read_copy(folder):
    target = folder.with_name("copy")
    ft_ckpt.copy(folder / "run/checkpoint-2", target)
    return verify(target).ok


READS = {
    "load_model": read_model,
    "load_model verified": partial(read_model, verify=True),
    "adapter": read_adapter,
    "resume": read_run,
    "resume of rank 0 of two": partial(read_run_on_two_nodes, faulty_rank=0),
    "resume of rank 1 of two": partial(read_run_on_two_nodes, faulty_rank=1),
    "verify": read_verdict,
    "latest": read_latest,
    "discover": read_steps,
    ".safetensors": partial(read_file, "out.safetensors"),
    ".safetensors now": partial(read_file, "out.safetensors", map_location="cpu"),
    ".pt": partial(read_file, "out.pt"),
    ".h5": partial(read_file, "out.h5"),
    ".h5 compressed": partial(read_file, "packed.h5"),
    "copy": read_copy,
}


def read(folder, case):
    """What is read, and the warnings that name it, as JSON."""
    problems.PAUSES_SECONDS = (0.0, 0.0)  # lasting faults would wait at each trial
    heard = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("ft_ckpt").addHandler(handler)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        value = said_of(READS[case](folder))
    heard += [str(warning.message) for warning in warned]
    return json.dumps(
        [value, [text for text in heard if str(folder) in text or "checkpoint-" in text]]
    )


@pytest.fixture(scope="module")
def unread(preloaded, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reads") / "folder"
    assert preloaded.run(prepare_reads, folder).status == 0
    return folder


@pytest.fixture
def readable(unread, tmp_path):
    """A folder of its own for each case: a fault may leave the lease of a run, and processes of
    another host wait for it.
    """
    return shutil.copytree(unread, tmp_path / "folder", symlinks=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", READS)
def test_every_fault_of_a_read(preloaded, readable, case):
    """The right values, an error of ours, or a warning that names the file."""
    expected = []

    def trial(world):
        ended = world.run(read, readable, case)
        shutil.rmtree(readable.with_name("copy"), ignore_errors=True)
        assert ended.is_right, ended
        if not world.fault:
            expected.extend(json.loads(ended.text))
            assert expected[1:] == [[]]
        if ended.status != REFUSED:
            value, heard = json.loads(ended.text)
            assert heard or value == expected[0], ended

    try_worlds(trial, System(preloaded, *FAULTS, *LASTING_OF_READS, reads=True))


# Flipped bits


def saved_kinds(root):
    """A checkpoint of each kind there is, as (name, folder)."""
    model, run = models.lora(), models.gpt2()
    optimizer = torch.optim.AdamW(run.parameters())
    run(**models.batch(0)).loss.backward()
    optimizer.step()
    with CheckpointSaver() as saver:
        saver.save(models.llama(), root / "sharded", step=1, max_shard_size=20_000)
        saver.save(model, root / "adapter", adapter_only=True)
        saver.save(models.policy_and_value(), root / "parts", attribute=["policy", "value_head"])
    for form, options in (("h5", {}), ("dual", {}), ("h5", {"compression": "gzip"})):
        with CheckpointSaver(format=form, **options) as saver:
            saver.save(models.llama(), root / f"{form}{'-'.join(options)}")
    with CheckpointSaver(None, root / "run") as saver:
        saver.register(model=run, optimizer=optimizer)
        saver.save_state(run)
    return sorted(path.parent for path in root.rglob(MANIFEST_NAME))


def flips(root, count):
    """Flip one bit after another anywhere in the checkpoints, and ask for each whether it is
    found.
    """
    seed = chosen_seed()
    chances, missed = random.Random(seed), []
    files = [file for folder in saved_kinds(root) for file in folder.rglob("*") if file.is_file()]
    folders = {
        file: next(each for each in file.parents if (each / MANIFEST_NAME).exists())
        for file in files
    }
    for _ in range(count):
        file = chances.choice(files)
        place, bit = chances.randrange(file.stat().st_size), chances.randrange(8)
        flip(file, place, bit)
        if is_whole(folders[file]):
            missed.append(f"{file.relative_to(root)}: bit {bit} of byte {place}")
        flip(file, place, bit)
    assert missed == []
    assert all(is_whole(folder) for folder in set(folders.values()))


def flip(file, place, bit):
    with file.open("r+b", buffering=0) as stream:
        stream.seek(place)
        (byte,) = stream.read(1)
        stream.seek(place)
        stream.write(bytes([byte ^ 1 << bit]))


def is_whole(folder):
    try:
        report = verify(folder)
        return report.ok and not report.notes  # a changed model card is a note
    except ManifestError:
        return False


def test_a_flipped_bit_is_found(tmp_path):
    flips(tmp_path, examples(100))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_thousand_flipped_bits_are_found(tmp_path):
    flips(tmp_path, 1000)
