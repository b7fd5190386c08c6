"""Copies the signature of a checkpoint along with the checkpoint.

A signature covers the bytes of the manifest. A copy on a disk gets exactly the signed manifest. A
copy in a bucket has another manifest, because it has the ETags of the objects. There, the object
`SIGNED` keeps the signature and the signed manifest for later copies to a disk.
"""

import json
from contextlib import suppress
from dataclasses import asdict, dataclass

from ft_ckpt.checkpoint import OpenCheckpoint
from ft_ckpt.checkpoint.checks import SIGNATURE_NAME
from ft_ckpt.checkpoint.leases import SIGNED
from ft_ckpt.checkpoint.manifest import (
    MANIFEST_LIMIT_BYTES,
    MANIFEST_NAME,
    Manifest,
    manifest_text,
    parse_manifest,
)
from ft_ckpt.errors import (
    CheckpointError,
    CorruptError,
    ManifestError,
    MissingError,
    UnreadableError,
)
from ft_ckpt.extensions.transfer.copies.identity import is_same_copy
from ft_ckpt.messages import warn
from ft_ckpt.storage import Store, permission_bits, read_text

_LIMIT_BYTES = 2 * MANIFEST_LIMIT_BYTES


@dataclass(frozen=True)
class Signed:
    """A signature, and the text of the manifest that it covers."""

    bundle: str
    text: str

    @property
    def manifest(self) -> Manifest | None:
        """The parsed text, or None if it is not a manifest."""
        with suppress(ManifestError):
            return parse_manifest(self.text, SIGNED)
        return None


def read_signature(store: Store) -> Signed | None:
    """Read the signature of the checkpoint in `store`, without checking it.

    Returns None if there is no signature. If it is not text, warns and returns None.
    """
    with suppress(MissingError):
        if store.local_folder is not None:
            try:
                return Signed(read_text(store, SIGNATURE_NAME, _LIMIT_BYTES), manifest_text(store))
            except CorruptError as error:
                if isinstance(error, (MissingError, UnreadableError)):
                    raise
                warn(f"{error}; taken for no signature")
                return None
        with suppress(KeyError, TypeError, ValueError):
            document = json.loads(read_text(store, SIGNED, _LIMIT_BYTES))
            return Signed(str(document["bundle"]), str(document["text"]))
    return None


def signature_of_copy(checkpoint: OpenCheckpoint, manifest: Manifest) -> Signed | None:
    """Return the signature of an open checkpoint if it covers exactly what `manifest` lists.

    Returns None otherwise. The signature may cover more files, or be of an older checkpoint.
    """
    signed = read_signature(checkpoint.place.folder)
    if signed is None or not is_same_copy(signed.manifest, manifest):
        return None
    return signed


def put_signature(store: Store, signed: Signed) -> None:
    """Write the signature of the copy in `store`.

    Warns if the copy has another manifest than the signed one, or if writing fails.
    """
    try:
        if read_signature(store) == signed:
            return
        if store.local_folder is None:
            store.write(SIGNED, json.dumps(asdict(signed)).encode())
            return
        if manifest_text(store) == signed.text:
            mode = permission_bits(store.local_folder / MANIFEST_NAME)
            store.limited(mode).write(SIGNATURE_NAME, signed.bundle.encode())
            return
        reason = "the manifest of the copy differs from the signed one"
    except CheckpointError as error:
        reason = str(error)

    warn(
        f"{store.where(SIGNATURE_NAME)}: not copied: {reason}; `ft-ckpt sign` signs the copy",
    )
