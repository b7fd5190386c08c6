"""Signatures in the format of OpenSSF's model-signing, by its own library.

`model.sig` in a checkpoint's folder is a Sigstore bundle with the SHA-256 of the manifest and of
every file that the manifest lists. The manifest itself cannot list the signature. Leases, pins and
other marks of ft_ckpt are not signed.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from ft_ckpt.checkpoint.manifest import MANIFEST_NAME, Manifest
from ft_ckpt.errors import (
    CheckpointError,
    ConfigError,
    CorruptError,
    MissingError,
    TargetError,
    UnreadableError,
    damaged_input,
    shown,
)
from ft_ckpt.messages import install_hint, printable
from ft_ckpt.storage import PREFIX, Store, read_text, walk_tree
from ft_ckpt.storage.local import LocalStore, folder_of, temporary_store

SIGNATURE_NAME = "model.sig"  # as the library names it
# PEM file of a public key, or (identity, provider)
SignedBy: TypeAlias = str | os.PathLike[str] | tuple[str, str]
_LIMIT_BYTES = 64 << 20
_EXPECTED = "expected a PEM file, elliptic curve P-256, P-384 or P-521"
_UNSIGNED = (SIGNATURE_NAME, f"{PREFIX}pin")  # recorded in the bundle, for readers without ft_ckpt


def make_signature(
    opened: Store,
    manifest: Manifest,
    key: str | os.PathLike[str] | None,
    password: str | None,
    provider: str | None,
) -> bytes:
    """Make the bundle for the checkpoint whose open files are in `opened`.

    Without `key`, Sigstore's keyless signing makes the signature. Raises ConfigError for an
    unusable key, or without the library; TargetError if Sigstore cannot be used now.
    """
    hashing, signing, _ = _libraries()
    config = signing.Config().set_hashing_config(
        _ListedFiles(_hashing_of(hashing), manifest, trusts=True)
    )
    if key is None:
        with _explained("Sigstore: cannot be used now", TargetError):
            config.use_sigstore_signer(oidc_issuer=provider, use_ambient_credentials=True)
    else:
        with _explained(f"{os.fspath(key)}: not usable as a private key, {_EXPECTED}"):
            config.use_elliptic_key_signer(
                private_key=Path(key), password=password and password.encode()
            )

    with temporary_store(prefix="ft_ckpt-sign-") as scratch:
        named = _named_folder(opened, scratch)
        with _explained(f"{named.name}: not signed", TargetError):
            config.sign(named, scratch.folder / SIGNATURE_NAME)
        return scratch.read(SIGNATURE_NAME)


def signature_problems(
    origin: Store, opened: Store, manifest: Manifest, signed_by: SignedBy
) -> tuple[str, ...]:
    """Return the reasons why a checkpoint is not signed by `signed_by`.

    `origin` is the place of the checkpoint, and `opened` has its open files. `signed_by` is the
    path of a public key, or (identity, provider) of a keyless signature. Every file is read. Raises
    ConfigError for a checkpoint in a bucket, an unusable key, or without the library;
    UnreadableError if Sigstore cannot be used now.
    """
    unlisted = unlisted_files(folder_of(origin), manifest)
    hashing, _, verifying = _libraries()
    config = verifying.Config().set_hashing_config(_ListedFiles(_hashing_of(hashing), manifest))
    if isinstance(signed_by, tuple):
        signer = f"{signed_by[0]} ({signed_by[1]})"
        with _explained("Sigstore: cannot be used now", UnreadableError):
            config.use_sigstore_verifier(identity=signed_by[0], oidc_issuer=signed_by[1])
    else:
        signer = os.fspath(signed_by)
        with _explained(f"{signer}: not usable as a public key, {_EXPECTED}"):
            config.use_elliptic_key_verifier(public_key=Path(signer))

    problems = [f"{name}: not signed; move it away" for name in unlisted]
    try:
        bundle = read_text(origin, SIGNATURE_NAME, _LIMIT_BYTES)
    except MissingError:
        expected = f"expected a signature by {signer}; `ft-ckpt sign` makes one"
        return (*problems, f"{SIGNATURE_NAME}: missing, {expected}")
    except CorruptError as error:
        return (*problems, f"{SIGNATURE_NAME}: cannot be read ({error})")

    with temporary_store(prefix="ft_ckpt-sign-") as scratch:
        scratch.write(SIGNATURE_NAME, bundle.encode())
        try:
            config.verify(_named_folder(opened, scratch), scratch.folder / SIGNATURE_NAME)
        except Exception as error:  # noqa: BLE001 - a bundle may contain anything
            # the library's list of the files that differ
            is_list = str(error).startswith("Signature mismatch")
            why = printable(str(error)) if is_list else shown(error)
            problems.append(f"{SIGNATURE_NAME}: not a signature of these files by {signer}: {why}")

    return tuple(problems)


def _named_folder(opened: Store, scratch: LocalStore) -> Path:
    """Link to the open folder under the name of the checkpoint, which the library records."""
    link = scratch.folder / "folder" / Path(opened.url).name
    link.parent.mkdir()
    link.symlink_to(folder_of(opened).absolute())
    return link


def unlisted_files(folder: Path, manifest: Manifest) -> list[str]:
    """Return, sorted, the files in `folder` that are not signed; marks are left out."""
    signed = {SIGNATURE_NAME, *_signed_names(manifest)}
    names = []
    with damaged_input(folder):
        for path in walk_tree(folder):
            if path.is_dir() and not path.is_symlink():
                continue
            name = path.relative_to(folder).as_posix()
            is_mark = name.startswith(PREFIX) and "/" not in name
            if name not in signed and not is_mark:
                names.append(name)
    return sorted(names)


def _signed_names(manifest: Manifest) -> list[str]:
    return [MANIFEST_NAME, *(file.path for file in manifest.files)]


@dataclass(frozen=True)
class _ListedFiles:
    """The library's hashing configuration, for exactly the files that a signature covers."""

    config: Any  # model_signing.hashing.Config
    manifest: Manifest
    trusts: bool = False  # whether a SHA-256 in the manifest is used instead of computed

    def hash(self, model_path: Path, **_: Any) -> Any:
        recorded = {}
        if self.trusts:
            recorded = {file.path: file.sha256 for file in self.manifest.files if file.sha256}
        paths = [model_path / name for name in _signed_names(self.manifest) if name not in recorded]
        present = [path for path in paths if path.is_file()]
        return _with_recorded(self.config.hash(model_path, files_to_hash=present), recorded)

    def add_ignored_paths(self, **_: Any) -> None:
        """Do nothing, because a bundle must not exclude files."""


def _with_recorded(hashed: Any, recorded: Mapping[str, str]) -> Any:
    """Add files with the `recorded` SHA-256, in hexadecimal, to the library's manifest."""
    from model_signing import manifest as library

    kind = library.SerializationType.from_args(hashed.serialization_type)
    descriptors = list(hashed.resource_descriptors())
    items = [kind.new_item(file.identifier, file.digest) for file in descriptors]
    sample = descriptors[0].digest  # of ft_ckpt.json, which is always computed
    for name, sha256 in recorded.items():
        digest = replace(sample, digest_value=bytes.fromhex(sha256))
        items.append(kind.new_item(name, digest))
    return library.Manifest(hashed.model_name, items, kind)


def _hashing_of(hashing: Any) -> Any:
    """Configure SHA-256 of whole files, in a folder that is a link (see `_named_folder`)."""
    return (
        hashing.Config()
        .set_ignored_paths(paths=_UNSIGNED, ignore_git_paths=False)
        .set_allow_symlinks(True)
    )


def _libraries() -> tuple[Any, Any, Any]:
    try:
        from model_signing import hashing, signing, verifying
    except ImportError as error:
        raise ConfigError(
            f"signatures need model-signing ({error}); {install_hint('sign')}"
        ) from error
    return hashing, signing, verifying


@contextmanager
def _explained(what: str, kind: type[CheckpointError] = ConfigError) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise kind(f"{what} ({shown(error)})") from error
