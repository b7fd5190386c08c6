"""Signatures with real keys: a signed folder that gains, loses or changes a file is refused, and
the file is named.
"""

import base64
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import models
import pytest
from buckets import in_bucket, new_bucket
from faults import Disk, World, try_worlds
from launch import run_python
from small_checkpoints import contents, rewrite_manifest, save, save_with_state

import ft_ckpt
from ft_ckpt import CheckpointSaver, Keep
from ft_ckpt.checkpoint import open_checkpoint
from ft_ckpt.checkpoint.checks import SIGNATURE_NAME, signature, verify
from ft_ckpt.checkpoint.commit import open_staging
from ft_ckpt.checkpoint.leases import pin
from ft_ckpt.checkpoint.manifest import read_manifest
from ft_ckpt.cli import run_command
from ft_ckpt.errors import ConfigError, CorruptError, ManifestError, NotACheckpointError
from ft_ckpt.extensions.transfer.copies import sign
from ft_ckpt.extensions.transfer.sending import copy, push, sync
from ft_ckpt.runs.folder import prune_run
from ft_ckpt.storage.places import Place, open_place

pytest.importorskip("model_signing")
RUN = "import sys; from ft_ckpt.cli import main; main()"


def new_key(folder: Path, name: str, password: str | None = None) -> tuple[Path, Path]:
    """The files of a private and a public key."""
    from cryptography.hazmat.primitives import serialization as written
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    secret = (
        written.BestAvailableEncryption(password.encode()) if password else written.NoEncryption()
    )
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    private.write_bytes(
        key.private_bytes(written.Encoding.PEM, written.PrivateFormat.PKCS8, secret)
    )
    info = written.PublicFormat.SubjectPublicKeyInfo
    public.write_bytes(key.public_key().public_bytes(written.Encoding.PEM, info))
    return private, public


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return new_key(tmp_path_factory.mktemp("keys"), "ours")


@pytest.fixture
def signed(tmp_path: Path, keys: tuple[Path, Path]) -> Path:
    """A signed checkpoint with two parts and four shards."""
    path = tmp_path / "run/checkpoint-1"
    save(path, step=1, shards=2, parts=("", "policy"))
    assert sign(path, keys[0]) == path / SIGNATURE_NAME
    return path


def problems(path: Path, key: Path) -> str:
    return "; ".join(verify(path, signed_by=key).problems)


def test_a_signed_checkpoint_is_whole_and_stays_what_it_was(
    signed: Path, keys: tuple[Path, Path]
) -> None:
    before = contents(signed)
    sign(signed, keys[0])  # again
    pin(open_place(signed), "the paper's")
    with open_checkpoint(open_place(signed)):
        assert problems(signed, keys[1]) == ""
    assert verify(signed).ok
    assert {name for name, content in contents(signed).items() if before.get(name) != content} == {
        SIGNATURE_NAME,
        ".ft_ckpt-pin",
    }


@pytest.mark.parametrize("form", ["safetensors", "h5", "dual"])
def test_sha256_of_the_save_need_not_be_taken_again(
    tmp_path: Path, keys: tuple[Path, Path], form: str
) -> None:
    with CheckpointSaver(
        digest="sha256", format=form, max_shard_size=30_000, background=form == "dual"
    ) as saver:
        saver.save(models.build("llama"), tmp_path / "x")
    files = {
        file.path: file.sha256
        for file in read_manifest(open_place(tmp_path / "x")).files
        if file.sha256
    }
    assert len(files) > 1
    assert files == {
        name: hashlib.sha256((tmp_path / "x" / name).read_bytes()).hexdigest() for name in files
    }
    sign(tmp_path / "x", keys[0])
    assert problems(tmp_path / "x", keys[1]) == ""
    name = min(files)
    content = (tmp_path / "x" / name).read_bytes()
    (tmp_path / "x" / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    sign(tmp_path / "x", keys[0])  # the file is not read
    assert name in problems(tmp_path / "x", keys[1])


def test_sha256_that_is_none_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "x")
    rewrite_manifest(tmp_path / "x", lambda document: document["files"][0].update(sha256="abc"))
    with pytest.raises(ManifestError, match="sha256 'abc', expected 64 hex digits"):
        read_manifest(open_place(tmp_path / "x"))


def test_the_library_itself_accepts_it(signed: Path, keys: tuple[Path, Path]) -> None:
    pin(open_place(signed))
    command = [sys.executable, "-m", "model_signing", "verify", "key", str(signed)]
    command += ["--signature", str(signed / SIGNATURE_NAME), "--public_key", str(keys[1])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (signed / "policy/config.json").write_text("{}")
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0


def test_what_the_library_signs_is_accepted(signed: Path, keys: tuple[Path, Path]) -> None:
    (signed / SIGNATURE_NAME).unlink()
    command = [sys.executable, "-m", "model_signing", "sign", "key", str(signed)]
    command += ["--signature", str(signed / SIGNATURE_NAME), "--private_key", str(keys[0])]
    subprocess.run(command, capture_output=True, check=True)
    assert problems(signed, keys[1]) == ""


def test_a_signature_that_leaves_files_out_is_refused(
    signed: Path, keys: tuple[Path, Path]
) -> None:
    (signed / SIGNATURE_NAME).unlink()
    command = [sys.executable, "-m", "model_signing", "sign", "key", str(signed)]
    command += ["--signature", str(signed / SIGNATURE_NAME), "--private_key", str(keys[0])]
    subprocess.run(
        [*command, "--ignore-paths", str(signed / "config.json")], capture_output=True, check=True
    )
    assert "config.json" in problems(signed, keys[1])


def test_unsigned_and_signed_by_another(
    signed: Path, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    other = new_key(tmp_path, "other")[1]
    assert "model.sig: not a signature of these files" in problems(signed, other)
    assert str(other) in problems(signed, other)
    (signed / SIGNATURE_NAME).unlink()
    assert "model.sig: missing" in problems(signed, keys[1])


def test_a_signature_of_another_checkpoint_is_refused(
    signed: Path, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    save(tmp_path / "checkpoint-2", step=2, shards=2, parts=("", "policy"))
    sign(tmp_path / "checkpoint-2", keys[0])
    shutil.copy(tmp_path / "checkpoint-2" / SIGNATURE_NAME, signed)
    assert "Signature mismatch" in problems(signed, keys[1])


def change(folder: Path, draw: random.Random) -> str:
    """Change one thing in a signed folder; returns a text that a refusal has to contain."""
    files = sorted(
        path for path in folder.rglob("*") if path.is_file() and path.name != SIGNATURE_NAME
    )
    file = draw.choice(files)
    name = file.relative_to(folder).as_posix()
    kind = draw.choice(
        ["flip", "flip", "flip", "grow", "cut", "add", "remove", "rename", "swap", "link"]
    )
    if kind == "flip":
        content = bytearray(file.read_bytes())
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        file.write_bytes(content)
    elif kind in ("grow", "cut"):
        content = file.read_bytes()
        file.write_bytes(
            content + b"\n" if kind == "grow" else content[: draw.randrange(len(content))]
        )
    elif kind == "add":
        new = draw.choice(
            [
                "notes.txt",
                ".gitattributes",
                ".hidden",
                "policy/more.py",
                "deep/er/x.bin",
                "policy/.ft_ckpt-x",
            ]
        )
        (folder / new).parent.mkdir(parents=True, exist_ok=True)
        (folder / new).write_bytes(draw.randbytes(draw.randrange(9)))
        return new
    elif kind == "link":
        (folder / "linked").symlink_to(draw.choice([folder / "policy", file, folder / "nowhere"]))
        return "linked"
    elif kind == "remove":
        file.unlink()
    elif kind == "rename":
        file.rename(file.with_name(f"other-{file.name}"))
    else:
        other = draw.choice([each for each in files if each.read_bytes() != file.read_bytes()])
        content = file.read_bytes()
        file.write_bytes(other.read_bytes())
        other.write_bytes(content)
    return name


@pytest.mark.parametrize("times", [30, pytest.param(500, marks=pytest.mark.slow)])
def test_every_change_is_refused(signed: Path, keys: tuple[Path, Path], times: int) -> None:
    """Files with changed bytes, added, removed, renamed, swapped; the manifest is one of them."""
    draw = random.Random(times)
    for number in range(times):
        copied = shutil.copytree(signed, signed.with_name(f"copy-{number}"))
        named = change(copied, draw)
        try:
            found = verify(copied, signed_by=keys[1])
        except (NotACheckpointError, ft_ckpt.errors.ManifestError) as error:
            assert "ft_ckpt.json" in str(error)  # noqa: PT017 - one of two outcomes
        else:
            assert not found.ok, (number, named)
            assert named in "; ".join(found.problems), (number, named, found.problems)
        shutil.rmtree(copied)


@pytest.mark.parametrize("times", [30, pytest.param(500, marks=pytest.mark.slow)])
def test_a_changed_signature_is_refused_or_says_the_same(
    signed: Path, keys: tuple[Path, Path], times: int
) -> None:
    """A bundle has bytes that carry nothing, such as spaces; those that are signed stay."""
    draw, file = random.Random(times), signed / SIGNATURE_NAME
    whole = file.read_bytes()
    for number in range(times):
        content = bytearray(whole)
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        if number % 3 == 0:
            del content[draw.randrange(len(content)) :]
        file.write_bytes(content)
        found = problems(signed, keys[1])
        assert "model.sig: " in found or payload(content) == payload(whole), (number, found)


def payload(bundle: bytes) -> bytes:
    return base64.b64decode(json.loads(bundle)["dsseEnvelope"]["payload"])


def test_what_cannot_be_signed(signed: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    before = (signed / SIGNATURE_NAME).read_bytes()
    (signed / "notes.txt").write_text("")
    with pytest.raises(CorruptError, match=r"notes\.txt: not listed"):
        sign(signed, keys[0])
    (signed / "notes.txt").unlink()
    for key in (keys[1], tmp_path / "absent", signed / "config.json"):
        with pytest.raises(ConfigError, match="not usable as a private key"):
            sign(signed, key)
    with pytest.raises(ConfigError, match="not usable as a public key"):
        verify(signed, signed_by=keys[0])
    (signed / "config.json").write_text("{}")
    with pytest.raises(CorruptError, match=r"config\.json.*not signed"):
        sign(signed, keys[0])
    with pytest.raises(NotACheckpointError):
        sign(tmp_path, keys[0])
    assert (signed / SIGNATURE_NAME).read_bytes() == before


def test_one_that_is_replaced_meanwhile(
    signed: Path, keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = signature.make_signature

    def make_late(*what: object) -> bytes:
        bundle = made(*what)
        save(signed, step=2)
        return bundle

    monkeypatch.setattr(
        sys.modules["ft_ckpt.extensions.transfer.copies.signing"], "make_signature", make_late
    )
    with pytest.raises(CorruptError, match="replaced while it was signed"):
        sign(signed, keys[0])
    assert not (signed / SIGNATURE_NAME).exists()


def test_an_encrypted_key(signed: Path, tmp_path: Path) -> None:
    private, public = new_key(tmp_path, "secret", "word")
    with pytest.raises(ConfigError, match="not usable as a private key"):
        sign(signed, private)
    sign(signed, private, password="word")
    assert problems(signed, public) == ""


def test_a_new_save_drops_the_signature(signed: Path, keys: tuple[Path, Path]) -> None:
    save(signed, step=2)
    assert not (signed / SIGNATURE_NAME).exists()
    sign(signed, keys[0])
    (signed / "notes.txt").write_text("mine")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(signed)  # it cannot be moved: files are poured into it
        save(signed, step=3)
    assert not (signed / SIGNATURE_NAME).exists()
    assert (signed / "notes.txt").read_text() == "mine"


@pytest.mark.sample("False")
@pytest.mark.parametrize("pours", [False, True])
def test_a_save_that_is_killed_leaves_both_or_none(
    signed: Path, keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, pours: bool
) -> None:
    """The old checkpoint with its signature, or the new one without: whichever call was the
    last.
    """
    if pours:
        monkeypatch.chdir(signed)

    def overwrite() -> None:
        save(signed, step=2)

    def trial(world: World) -> None:
        save(signed, step=1)
        sign(signed, keys[0])
        world.run(overwrite)
        open_staging(signed)
        if verify(signed).ok and read_manifest(open_place(signed)).step == 1:
            assert problems(signed, keys[1]) == ""
        else:
            assert "missing" in problems(signed, keys[1])

    assert try_worlds(trial, Disk("killed"), every=3).calls > 6


def test_retention_deletes_it_with_what_it_signs(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    for step in (1, 2, 3):
        save_with_state(tmp_path / f"checkpoint-{step}", step, run_id="a")
        sign(tmp_path / f"checkpoint-{step}", keys[0])
    report = prune_run(open_place(tmp_path), Keep(last=2, state=Keep(last=1)))
    assert (report.dropped, report.left, report.problems) == ((tmp_path / "checkpoint-1",), (), ())
    assert not (tmp_path / "checkpoint-1").exists()
    assert report.stripped == (tmp_path / "checkpoint-2",)
    assert not (tmp_path / "checkpoint-2" / SIGNATURE_NAME).exists()
    assert problems(tmp_path / "checkpoint-3", keys[1]) == ""


def test_a_copy_carries_it(signed: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    copy(signed, tmp_path / "out/copied")
    assert problems(tmp_path / "out/copied", keys[1]) == ""
    sync(signed.parent, tmp_path / "synced")
    assert problems(tmp_path / "synced/checkpoint-1", keys[1]) == ""
    (signed / SIGNATURE_NAME).unlink()
    copy(signed, tmp_path / "later")
    sign(signed, keys[0])
    assert not copy(signed, tmp_path / "later").is_new
    assert problems(tmp_path / "later", keys[1]) == ""


def test_it_comes_through_a_bucket(signed: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    bucket = new_bucket()
    there = Place(bucket, "checkpoint-1")
    copy(signed, there)
    assert verify(there).ok
    copy(there, tmp_path / "back")
    assert problems(tmp_path / "back", keys[1]) == ""
    copy(there, Place(new_bucket(), "checkpoint-1"))
    prune_run(Place(bucket), Keep(last=1))
    copy(there, tmp_path / "again")
    assert problems(tmp_path / "again", keys[1]) == ""
    save(signed, step=2)
    copy(signed, there, overwrite=True)
    copy(there, tmp_path / "unsigned")
    assert not (tmp_path / "unsigned" / SIGNATURE_NAME).exists()


@pytest.mark.filterwarnings("error")
def test_a_signature_that_is_no_text_does_not_stop_a_copy(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint-1", step=1)
    (tmp_path / "checkpoint-1" / SIGNATURE_NAME).write_bytes(b"\xff")
    with pytest.warns(UserWarning, match=r"model\.sig: not whole .*taken for no signature"):
        report = copy(tmp_path / "checkpoint-1", tmp_path / "copy")
    assert report.is_new
    assert verify(tmp_path / "copy").ok
    assert not (tmp_path / "copy" / SIGNATURE_NAME).exists()


def test_a_push_without_the_state_leaves_it_out(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    save_with_state(tmp_path / "checkpoint-1", 1)
    sign(tmp_path / "checkpoint-1", keys[0])
    there = Place(new_bucket(), "checkpoint-1")
    assert any(SIGNATURE_NAME in note for note in push(tmp_path / "checkpoint-1", there).notes)
    copy(there, tmp_path / "back")
    assert not (tmp_path / "back" / SIGNATURE_NAME).exists()


def test_one_in_a_bucket_is_refused_by_name(signed: Path, keys: tuple[Path, Path]) -> None:
    there = in_bucket(signed)
    for action in (lambda: sign(there, keys[0]), lambda: verify(there, signed_by=keys[1])):
        with pytest.raises(ConfigError, match="checkpoint-1: not on this machine's disks"):
            action()


def test_without_the_library(
    signed: Path, keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "model_signing.hashing", None)
    monkeypatch.delattr("model_signing.hashing", raising=False)
    for action in (lambda: sign(signed, keys[0]), lambda: verify(signed, signed_by=keys[1])):
        with pytest.raises(ConfigError, match="install the extra sign "):
            action()
    assert verify(signed).ok


def test_keyless_signatures_go_to_the_library(
    signed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sigstore needs a network; here is shown only what it is asked."""
    from model_signing import signing, verifying

    asked: list[object] = []

    def note(config: object, **options: object) -> object:
        asked.append(options)
        return config

    monkeypatch.setattr(signing.Config, "use_sigstore_signer", note)
    monkeypatch.setattr(verifying.Config, "use_sigstore_verifier", note)
    monkeypatch.setattr(
        signing.Config, "sign", lambda config, folder, to: Path(to).write_text("{}")
    )
    sign(signed, None, provider="https://login.example")
    report = verify(signed, signed_by=("ann@example.org", "https://login.example"))
    assert "ann@example.org (https://login.example)" in report.problems[-1]
    assert asked == [
        {"oidc_issuer": "https://login.example", "use_ambient_credentials": True},
        {"identity": "ann@example.org", "oidc_issuer": "https://login.example"},
    ]


def test_the_commands(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint-1", step=1)
    private, public = new_key(tmp_path, "key", "word")
    checkpoint = tmp_path / "checkpoint-1"
    environment = {**os.environ, "FT_CKPT_SIGN_PASSWORD": "word"}
    done = run_python(RUN, "sign", checkpoint, "--key", private, env=environment)
    assert (done.returncode, done.stdout) == (
        0,
        f"{checkpoint} -> {checkpoint / SIGNATURE_NAME}\n",
    ), done.stderr
    assert run_python(RUN, "verify", checkpoint, "--signed-by", public).returncode == 0
    (checkpoint / "extra.py").write_text("")
    done = run_python(RUN, "verify", checkpoint, "--signed-by", public)
    assert (done.returncode, "extra.py: not signed" in done.stdout) == (1, True)
    for wrong in (
        ["sign", checkpoint],
        ["sign", checkpoint, "--key", private, "--keyless"],
        ["verify", checkpoint, "--identity", "ann"],
        [
            "verify",
            checkpoint,
            "--signed-by",
            public,
            "--identity",
            "ann",
            "--identity-provider",
            "b",
        ],
        ["verify", tmp_path / "key.pem", "--signed-by", public],
    ):
        with pytest.raises((ConfigError, NotACheckpointError)):
            run_command([str(word) for word in wrong])


def test_a_model_is_loaded_only_if_it_is_signed(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    import models

    path = tmp_path / "final"
    with ft_ckpt.CheckpointSaver(None) as saver:
        saver.save(models.llama(), path)

    def load(**options: object) -> object:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ft_ckpt.load_model(path, **options)

    with pytest.raises(CorruptError, match=r"final: model\.sig: missing.*not loaded"):
        load(require_signature=keys[1])
    ft_ckpt.sign(path, keys[0])
    assert load(require_signature=keys[1]) is not None
    with pytest.raises(ConfigError, match="final: not on this machine's disks"):
        ft_ckpt.load_model(in_bucket(path), require_signature=keys[1])
    changes: list[tuple[str, Callable[[], object]]] = [
        ("Signature mismatch.*generation_config.json", (path / "generation_config.json").unlink),
        ("tokenizer.json: not signed", lambda: (path / "tokenizer.json").write_text("{}")),
    ]
    for pattern, act in changes:
        act()
        with pytest.raises(CorruptError, match=re.compile(pattern, re.DOTALL)):
            load(require_signature=str(keys[1]))
