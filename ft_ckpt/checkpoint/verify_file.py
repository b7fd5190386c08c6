"""One file by itself, compared with what the manifest of the checkpoint that it lies in has recorded of it."""

import dataclasses
from itertools import islice

from ft_ckpt.checkpoint.catalog import VerifyReport, load_manifest
from ft_ckpt.checkpoint.checks import small_problems
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME, Manifest
from ft_ckpt.storage.digests import FileRecord
from ft_ckpt.storage.place import Place
from ft_ckpt.storage.store import Store


def listing_manifest(place: Place) -> tuple[Store, Manifest, FileRecord] | None:
    """The checkpoint that lists the file at `place`: its store, its manifest, the record. None where none does.

    Raises ManifestError for a manifest that is damaged.
    """
    for store, name in islice(place.folders_around(), 1, None):
        if store.stat(MANIFEST_NAME) is not None:
            manifest = load_manifest(store)
            record = {record.path: record for record in manifest.files}.get(name)
            if record is not None:
                return store, manifest, record
    return None


def verify_listed(place: Place) -> VerifyReport | None:
    """Compare size and digest of the file at `place`; None where no manifest lists it. Raises ManifestError."""
    found = listing_manifest(place) if place.is_object else None
    if found is None:
        return None
    store, manifest, record = found
    alone = dataclasses.replace(manifest, files=(record,))
    problems = tuple(small_problems(store, alone, record.size_bytes + 1))
    return VerifyReport(place.location, not problems, problems, 1, record.size_bytes)
