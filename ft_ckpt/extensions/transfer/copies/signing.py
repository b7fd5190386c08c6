"""Signs a committed checkpoint."""

import os
from pathlib import Path

from ft_ckpt.checkpoint import open_checkpoint, text_identity
from ft_ckpt.checkpoint.checks import SIGNATURE_NAME, make_signature, unlisted_files
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME, manifest_text
from ft_ckpt.errors import CorruptError, listing
from ft_ckpt.storage import permission_bits
from ft_ckpt.storage.local import LocalStore, folder_of
from ft_ckpt.storage.places import Place, open_place


def sign(
    path: str | os.PathLike[str] | Place,
    key: str | os.PathLike[str] | None,
    *,
    password: str | None = None,
    provider: str | None = None,
) -> Path:
    """Compare the digests of the checkpoint `path`, and sign it.

    Returns the path of the signature, which is the file `model.sig` in the checkpoint. The
    signature covers the manifest and every file that the manifest lists, in the format of OpenSSF's
    model-signing. An older signature is replaced.

    Files whose SHA-256 was stored with the save (SaverConfig.digest) are not read. If one is
    damaged, the signature does not match it, and verification fails. All other files are read and
    compared with their digests.

    `key`: the PEM file of a private key (P-256, P-384 or P-521), encrypted with `password` if that
    is given. If it is None, Sigstore's keyless signing is used. This needs a network, and the
    credentials of the environment or a login at `provider`.

    Raises NotACheckpointError if nothing is committed there. Raises CorruptError if files differ
    from the manifest, if other files are in the folder, or if the checkpoint is replaced during the
    call. Raises ConfigError for a checkpoint in a bucket, an unusable key, or without the library
    (the extra sign, docs/install.md). Raises TargetError if the signature cannot be written.
    """
    place = open_place(path)
    folder = folder_of(place.folder)
    with open_checkpoint(place) as checkpoint:
        with_sha256 = {file.path for file in checkpoint.manifest.files if file.sha256}
        problems = checkpoint.find_problems(deep=True, left_out=with_sha256)
        if problems:
            raise CorruptError(f"{folder}: {listing(problems)}; not signed, use another checkpoint")
        unlisted = unlisted_files(folder, checkpoint.manifest)
        if unlisted:
            raise CorruptError(
                f"{folder}: {listing(unlisted, ', ')}: not listed by the "
                "manifest; move it away and sign"
            )

        if any(file.path == SIGNATURE_NAME for file in checkpoint.manifest.files):
            raise CorruptError(
                f"{folder}: {SIGNATURE_NAME}: listed by the manifest, expected no file of this name"
            )

        bundle = make_signature(checkpoint.store, checkpoint.manifest, key, password, provider)
        store = LocalStore(folder, max_mode=permission_bits(folder / MANIFEST_NAME))
        store.write(SIGNATURE_NAME, bundle)
        if text_identity(manifest_text(store).encode()) != checkpoint.identity:
            store.delete([SIGNATURE_NAME])
            raise CorruptError(f"{folder}: replaced while it was signed; sign it again")

    return folder / SIGNATURE_NAME
