"""Verifies a checkpoint: `verify`, and the damage that keeps a checkpoint from being chosen."""

import os
from dataclasses import dataclass
from pathlib import Path

from ft_ckpt.checkpoint.cards import with_current_cards
from ft_ckpt.checkpoint.contents import why_no_checkpoint
from ft_ckpt.checkpoint.problems import (
    are_transient,
    checkpoint_problems,
    retry_transient,
    stored_bytes,
)
from ft_ckpt.checkpoint.signature import SignedBy, signature_problems
from ft_ckpt.checkpoint.stored_manifest import load_manifest, manifest_version
from ft_ckpt.errors import (
    NotACheckpointError,
    Problem,
    UnreadableError,
    damaged_input,
    listing,
)
from ft_ckpt.storage import Store
from ft_ckpt.storage.places import Place, hold_listed, open_place


@dataclass(frozen=True)
class VerifyReport:
    """The outcome of `verify`."""

    path: str | Path
    """The checkpoint: its path, or its URL."""
    ok: bool
    """Whether there are no problems."""
    problems: tuple[str, ...]
    """Differences from the manifest, each with the file first."""
    files: int
    """Number of files that the manifest lists."""
    bytes: int
    """Their size, in bytes."""
    notes: tuple[str, ...] = ()
    """Changes since the save that are no problem: a model card that was written again."""
    is_transient: bool = False
    """Whether the only problems are files that cannot be read now: they may be whole."""


def verify(
    path: str | os.PathLike[str] | Place, *, deep: bool = True, signed_by: SignedBy | None = None
) -> VerifyReport:
    """Compare the files of checkpoint `path` with its manifest.

    Always: names, sizes, the tensors in each safetensors header, each index, the digests of files
    below 1 MiB, and that there are no weights of another save. `deep` also reads all other bytes
    and compares the digests. A model card that was written again since the save is a note of the
    report. `signed_by`: also the signature, see `sign`, and that no file was added, deleted or
    changed since: the path of a public key, or (identity, provider) of a keyless signature.

    Raises NotACheckpointError, ManifestError or UnreadableError as `read_manifest` does;
    ConfigError when a signature cannot be checked: an unusable key, a checkpoint in a bucket, no
    model-signing library.
    """
    store = open_place(path).folder
    place = Place(store)
    while True:
        version = _version_or_none(store)
        view = store if version is None else hold_listed(store)
        try:
            manifest = load_manifest(view)
        except NotACheckpointError:
            raise NotACheckpointError(why_no_checkpoint(place)) from None
        with damaged_input(place.location):
            current, notes = with_current_cards(view, manifest)
            problems = list(dict.fromkeys(checkpoint_problems(view, current, deep=deep)))
            if signed_by is not None:
                problems += map(Problem, signature_problems(store, store, manifest, signed_by))
        # A concurrent save may have overwritten the checkpoint, so that a mixture of both was read.
        # Read again.
        if problems and _version_or_none(store) != version:
            continue
        return VerifyReport(
            place.location,
            ok=not problems,
            problems=tuple(str(problem) for problem in problems),
            files=len(manifest.files),
            bytes=stored_bytes(view, current),
            notes=notes,
            is_transient=are_transient(problems),
        )


def damage_of(place: Place, *, deep: bool = False) -> tuple[str, ...]:
    """The problems that `verify` reports; it is repeated if they may be temporary.

    Raises as `verify` does, and UnreadableError if the only problem is that files cannot be read
    now.
    """

    def find_problems() -> tuple[Problem, ...]:
        try:
            report = verify(place, deep=deep)
        except UnreadableError as error:
            return (Problem(str(error), is_transient=True),)
        return tuple(Problem(text, report.is_transient) for text in report.problems)

    problems = retry_transient(find_problems, are_transient)
    if are_transient(problems):
        raise UnreadableError(f"{place}: {listing(problems)}; try again")
    return tuple(problem.text for problem in problems)


def _version_or_none(store: Store) -> str | None:
    try:
        return manifest_version(store)
    except UnreadableError:
        return None
