"""A flipped bit in any file of a committed checkpoint, given to all that reads one: refused, or of
no effect.

Each trial damages one bit of one file and calls one reader. What comes out must be what comes out
of the whole checkpoint, unless it is an error of ours or a report that names the damage.
"""

import dataclasses
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from compare import raw
from peft import LoraConfig, get_peft_model
from seeds import chosen_seed
from torch import nn
from transformers import AutoModelForCausalLM

import ft_ckpt
from ft_ckpt import CheckpointSaver
from ft_ckpt.checkpoint.manifest import CARD_NAME, MANIFEST_NAME, read_manifest
from ft_ckpt.cli import run_command
from ft_ckpt.errors import CheckpointError, CorruptError
from ft_ckpt.storage.places import open_place

LORA = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")


class Refused(Exception):  # noqa: N818 - an outcome
    """A report that names the damage."""


# What is damaged: each kind of checkpoint in a folder of its own, beside a whole copy.


def run_of(folder: Path, seed: int = 0) -> CheckpointSaver:
    model = models.build("llama", seed)
    saver = CheckpointSaver(directory=folder, tokenizer=models.tokenizer())
    saver.register(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))
    return saver


def save_run(folder: Path) -> None:
    saver = run_of(folder.parent)
    model, optimizer = saver._run.model, saver._run.objects.registered["optimizer"]
    model(**models.batch(1)).loss.backward()
    optimizer.step()
    saver.step(step=3)
    saver.save_state(path=folder, metrics={"eval_loss": 1.0})


def save_parts(folder: Path) -> None:
    CheckpointSaver().save(
        models.build("policy_and_value"), folder, attribute=["policy", "value_head"]
    )


def saving(**settings: Any) -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        with CheckpointSaver(tokenizer=models.tokenizer()) as saver:
            saver.save(models.build("llama").eval(), folder, step=3, **settings)

    return save


def saving_adapter(**settings: Any) -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        base = AutoModelForCausalLM.from_pretrained(folder.parents[1] / "model" / "whole")
        with CheckpointSaver(tokenizer=models.tokenizer()) as saver:
            saver.save(models.trained(get_peft_model(base, LORA)), folder, **settings)

    return save


def converting(form: str) -> Callable[[Path], None]:
    def convert(folder: Path) -> None:
        ft_ckpt.convert(folder.parents[1] / "model" / "whole", folder, format=form, progress=False)

    return convert


MAKERS: dict[str, Callable[[Path], None]] = {
    "model": saving(),
    "shards": saving(max_shard_size=20_000),
    "dual": saving(format="dual"),
    "h5": saving(format="h5"),
    "packed": saving(format="h5", compression="gzip"),
    "torch": converting("torch"),
    "adapter": saving_adapter(adapter_only=True),
    "h5-adapter": saving_adapter(adapter_only=True, format="h5"),
    "both": saving_adapter(adapter_only=False),
    "parts": save_parts,
    "run": save_run,
}
MODELS = ("model", "shards", "dual", "h5", "packed", "torch")
ADAPTERS = ("adapter", "h5-adapter", "both")
LOADED = ("model", "shards", "dual", "h5", "packed", *ADAPTERS, "parts", "run")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    for kind, maker in MAKERS.items():
        maker(folder / kind / "damaged")
        shutil.copytree(folder / kind / "damaged", folder / kind / "whole", symlinks=True)
    return folder


# What reads it: each gives something that can be compared.


def manifest_facts(folder: Path) -> Any:
    """What a manifest says, but for the time and the digests of files with a time in them."""
    manifest = read_manifest(open_place(folder))
    files = tuple((file.path, file.size_bytes) for file in manifest.files)
    return dataclasses.replace(manifest, created="", files=(), versions={}), files


def test_a_link_to_a_file_of_a_checkpoint_is_compared(tmp_path: Path) -> None:
    saving()(tmp_path / "x")
    file, link = tmp_path / "x" / "model.safetensors", tmp_path / "link.safetensors"
    link.symlink_to(file)
    assert ft_ckpt.convert(link, tmp_path / "whole.pt", progress=False).tensors
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert run_command(["verify", str(link)]) == 1
    with pytest.raises(CorruptError, match=r"model\.safetensors.*digest"):
        ft_ckpt.convert(link, tmp_path / "out.pt", progress=False)
    assert not (tmp_path / "out.pt").exists()
    link.unlink()
    link.symlink_to(link)
    with pytest.raises(CheckpointError, match=r"link\.safetensors"):
        ft_ckpt.convert(link, tmp_path / "out.pt", progress=False)


def contents(path: Path | str) -> dict[str, Any]:
    """Every file in a folder, or the one file."""
    path = Path(path)
    if path.is_file():
        return {"": path.read_bytes()}
    # each of torch's distributed checkpoints has a number of its own
    apart = {MANIFEST_NAME, ".metadata"}
    files = (file for file in sorted(path.rglob("*")) if file.is_file() and file.name not in apart)
    found: dict[str, Any] = {file.relative_to(path).as_posix(): file.read_bytes() for file in files}
    if (path / MANIFEST_NAME).is_file():
        assert ft_ckpt.verify(path).ok
        found[MANIFEST_NAME] = manifest_facts(path)
    return found


def in_memory(value: Any) -> Any:
    """A model, or a nesting of them and tensors, as something that is compared."""
    if isinstance(value, nn.Module):
        config = getattr(value, "config", None)
        told = config.to_dict() if hasattr(config, "to_dict") else None
        generation = getattr(value, "generation_config", None)
        given = None if generation is None else generation.to_dict()
        return type(value).__name__, in_memory(value.state_dict()), told, given
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), raw(value)
    if isinstance(value, dict):
        return {key: in_memory(inner) for key, inner in value.items()}
    return value


def told(*words: object) -> Any:
    """What a command prints.

    Raises what ended it, Refused where it says that something is damaged.
    """
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", UserWarning)
        with redirect_stdout(StringIO()) as printed:
            code = run_command([str(word) for word in words])
    output = printed.getvalue()
    if "digest" in output or any("left out" in str(one.message) for one in warned):
        raise Refused(output, warned)
    assert code in (0, 1), output
    return code, output


def verified(path: Path) -> Any:
    report = ft_ckpt.verify(path)
    if not report.ok:
        raise Refused(report.problems)
    return report


def synced(run: Path, out: Path) -> Any:
    report = ft_ckpt.sync(run, out)
    if report.problems:
        raise Refused(report.problems)
    return contents(out)


def resumed(path: Path) -> Any:
    saver = run_of(path.parent, seed=9)
    report = saver.resume(str(path))
    values = in_memory(
        {
            "model": saver._run.model,
            "optimizer": saver._run.objects.registered["optimizer"].state_dict(),
        }
    )
    return report.step, values


def converted_to(suffix: str, **settings: Any) -> Callable[[Path, Path], Any]:
    def convert(path: Path, out: Path) -> Any:
        ft_ckpt.convert(path, out / f"new{suffix}", progress=False, **settings)
        return contents(out / f"new{suffix}")

    return convert


def averaged(first: bool) -> Callable[..., Any]:
    def average(path: Path, out: Path, other: Path | str | None = None) -> Any:
        places = [path, other or path.with_name("whole")]
        ft_ckpt.average(places if first else places[::-1], out / "new", progress=False)
        return contents(out / "new")

    return average


def merged(path: Path, out: Path, **settings: Any) -> Any:
    ft_ckpt.merge(path, out / "new", progress=False, **settings)
    return contents(out / "new")


def copied(path: Path, out: Path) -> Any:
    ft_ckpt.copy(path, out / "new")
    return contents(out / "new")


def loaded_files(path: Path, _out: Path) -> Any:
    weights = {
        tensor.file for part in read_manifest(open_place(path)).parts for tensor in part.tensors
    }
    return {
        name: in_memory(ft_ckpt.load(path / name, map_location="cpu", verify=True))
        for name in sorted(weights)
    }


def as_base(path: Path) -> Path:
    return path.parent.parent / "adapter" / "whole"


READERS: dict[str, tuple[tuple[str, ...], Callable[[Path, Path], Any]]] = {
    "convert to a folder": ((*MODELS, *ADAPTERS, "run"), converted_to("")),
    "convert to dual": (MODELS, converted_to("", format="dual", verify=True)),
    "convert to h5": ((*MODELS, *ADAPTERS, "run"), converted_to(".h5", verify=True)),
    "convert to torch": (MODELS, converted_to(".pt", dtype="bfloat16")),
    "convert to safetensors": (MODELS, converted_to(".safetensors")),
    "convert to shards": (MODELS, converted_to("", max_shard_size=20_000, format="safetensors")),
    "average, first": ((*MODELS, *ADAPTERS, "run"), averaged(True)),
    "average, last": ((*MODELS, *ADAPTERS, "run"), averaged(False)),
    "merge": (ADAPTERS, merged),
    "merge into it": (MODELS[:-1], lambda path, out: merged(as_base(path), out, base=path)),
    "load_model": (LOADED, lambda path, _: in_memory(ft_ckpt.load_model(path))),
    "load_model, verified": (
        LOADED,
        lambda path, _: in_memory(ft_ckpt.load_model(path, verify=True)),
    ),
    "load_model onto it": (
        MODELS[:3],
        lambda path, _: in_memory(ft_ckpt.load_model(as_base(path), base=str(path))),
    ),
    "load": (LOADED, loaded_files),
    "copy": (tuple(MAKERS), copied),
    "sync": (("run",), lambda path, out: synced(path.parent, out)),
    "verify": (tuple(MAKERS), lambda path, _: verified(path)),
    "resume": (("run",), lambda path, _: resumed(path)),
    "diff": (
        (*MODELS, *ADAPTERS, "run"),
        lambda path, _: told("diff", path, path.with_name("whole")),
    ),
    "show": (("model",), lambda path, _: told("show", path, "--json")),
    "ls": (("model", "run"), lambda path, _: told("ls", path.parent, "--json")),
    "report": (("run",), lambda path, _: told("report", path.parent, "--json")),
}


# The campaign


@dataclasses.dataclass(frozen=True)
class Trial:
    kind: str
    file: str
    reader: str


def all_trials(made: Path) -> list[Trial]:
    """Every reader of every file of each kind of checkpoint that it reads, but for model cards,
    which people edit.
    """
    files = {kind: [*contents(made / kind / "damaged")] for kind in MAKERS}
    files = {
        kind: [file for file in names if not file.endswith(CARD_NAME)]
        for kind, names in files.items()
    }
    return [
        Trial(kind, file, reader)
        for reader, (kinds, _) in READERS.items()
        for kind in kinds
        for file in files[kind]
    ]


def sample_of(trials: list[Trial]) -> Iterator[Trial]:
    """Some trials: every reader, and every file at least once."""
    seen: set[object] = set()
    for trial in trials:
        facts = {trial.reader, (trial.kind, trial.file)}
        if not facts <= seen:
            seen |= facts
            yield trial


@contextmanager
def flipped(file: Path, draw: random.Random) -> Iterator[int]:
    whole, content = file.read_bytes(), bytearray(file.read_bytes())
    bit = draw.randrange(8 * len(whole))
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)
    try:
        yield bit
    finally:
        file.write_bytes(whole)


def outcome(reader: Callable[[Any, Path], Any], path: Path | str, out: Path) -> Any:
    """What the reader makes of the checkpoint; None when it is refused, and then nothing may be
    there.
    """
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    try:
        return reader(path, out)
    except (CheckpointError, Refused):
        # which a sync brings, too
        left = [path.name for path in out.iterdir() if path.name != "whole"]
        assert not left
        return None


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("bits", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")
def test_a_flipped_bit_goes_nowhere(made, tmp_path, bits):
    """Every reader and every file of every kind, `bits` of each; with 0 one bit of a sample of
    them.
    """
    draw, trials = random.Random(chosen_seed()), all_trials(made)
    draw.shuffle(trials)
    chosen = trials if bits else [*sample_of(trials)]
    finds, refused = [], 0

    @cache
    def true_outcome(kind: str, reader: str) -> Any:
        return outcome(READERS[reader][1], made / kind / "damaged", tmp_path / "out")

    for trial in chosen * max(1, bits):
        path, reader = made / trial.kind / "damaged", READERS[trial.reader][1]
        with flipped(path / trial.file, draw) as bit:
            try:
                found = outcome(reader, path, tmp_path / "out")
            except Exception as error:  # no error of ours, or something is left
                found = error
        refused += found is None
        if found is not None and found != (true := true_outcome(trial.kind, trial.reader)):
            assert true is not None, trial
            finds.append((trial, bit, found if isinstance(found, Exception) else "another result"))
    print(f"{len(chosen) * max(1, bits)} trials, {refused} refused, {len(finds)} finds")
    assert not finds, finds
    assert refused > len(chosen) // 2


@pytest.mark.slow
def test_a_flipped_bit_in_a_bucket(made, tmp_path, monkeypatch, s3):
    """Of an object that the service takes for the one that was written."""
    monkeypatch.setenv("FT_CKPT_CACHE", str(tmp_path / "cache"))
    for kind in ("model", "dual", "adapter"):
        ft_ckpt.copy(made / kind / "damaged", f"s3://bucket/{kind}/damaged")
    readers = {"convert": converted_to("", format="h5"), "copy": copied, "merge": merged}
    readers |= {"average": lambda url, out: averaged(True)(made / "model" / "damaged", out, url)}
    readers |= {"diff": lambda url, _: told("diff", url, made / "model" / "whole")}
    readers |= {"load_model": lambda url, _: in_memory(ft_ckpt.load_model(url, verify=True))}
    readers |= {"pull": lambda url, out: ft_ckpt.pull(url, out / "new")}
    draw = random.Random(chosen_seed())
    for kind, file, names in (
        ("model", "model.safetensors", readers.keys() - {"merge"}),
        ("model", "tokenizer.json", {"convert", "average", "copy", "pull"}),
        ("dual", "model.safetensors", {"convert", "diff"}),
        ("adapter", "adapter_model.safetensors", {"merge", "convert", "copy"}),
    ):
        objects, key = s3.buckets["bucket"], f"{kind}/damaged/{file}"
        whole, content = objects[key], bytearray(objects[key].content)
        bit = draw.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        for name in sorted(names):
            for given, is_whole in (
                (whole, True),
                (dataclasses.replace(whole, content=bytes(content)), False),
            ):
                objects[key] = given
                found = outcome(readers[name], f"s3://bucket/{kind}/damaged", tmp_path / "out")
                assert (found is not None) == is_whole, (kind, file, name, bit)
        objects[key] = whole


def test_nothing_is_sent_of_a_damaged_checkpoint(made, s3):
    with flipped(made / "model" / "damaged" / "model.safetensors", random.Random(chosen_seed())):
        with pytest.raises(CorruptError, match=r"model\.safetensors: digest"):
            ft_ckpt.push(made / "model" / "damaged", "s3://bucket/model")
        with pytest.raises(CorruptError, match=r"model\.safetensors: digest"):
            ft_ckpt.convert(
                made / "model" / "damaged", "s3://bucket/new.safetensors", progress=False
            )
    assert not s3.names()
