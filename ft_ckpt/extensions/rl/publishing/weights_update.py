"""Follows one server whose full weights are replaced: its versions, digests and answers.

A packed layer is one that the server keeps in another layout than files; see `expected_digests`.

While weights are loaded, the version that a server reports ends in "(loading)", so that no server
reports weights that it does not hold if the publisher is killed.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ft_ckpt.errors import EngineError
from ft_ckpt.extensions.rl.engines import (
    EQUAL_WITHIN,
    ROUNDING,
    Answers,
    DigestComparison,
    PackedLayer,
    Server,
    ServerOptions,
    compare_digests,
    distance,
    is_known,
    is_unreported,
    probe,
)
from ft_ckpt.extensions.rl.publishing.source import ServedFolder, path_on_this_machine
from ft_ckpt.formats.files import TensorFile
from ft_ckpt.storage.local import LocalStore

LOADING = " (loading)"  # the end of the reported version while weights are replaced
FIRST_VERSION = "default"  # the version that vLLM and SGLang report for their initial weights
VERSION_ONLY = "the version only"
_UNREPORTED = "nothing: it reports neither digests nor a version"
_RESUME_TRIES, _RESUME_PAUSE_SECONDS = 4, 1.0


@dataclass(frozen=True)
class Weights:
    """Full weights to load, with their open files.

    Attributes:
        version: The version that servers report for them.
        folder: The folder that servers read.
        checkpoint: The path of the checkpoint.
        file: The tensors.
        config: The contents of config.json.
        options: The options of the publish.
        part: The name of the model in the checkpoint, "" for the whole checkpoint.
    """

    version: str
    folder: ServedFolder
    checkpoint: Path
    file: TensorFile
    config: Mapping[str, Any]
    options: ServerOptions
    part: str = ""

    @property
    def loading_version(self) -> str:
        return f"{self.version}{LOADING}"

    @cached_property
    def answers(self) -> Answers:
        """The answers of transformers to the prompts. The first use loads the model."""
        from ft_ckpt.extensions.rl.engines import model_answers

        return model_answers(self.checkpoint, self.part)


@dataclass
class Update:
    """One server during a publish of weights.

    Attributes:
        server: The server.
        before: The version that the server reported before the publish.
        base: The name of the served model.
        base_path: The path of the server's initial weights.
        is_new: Whether the weights must be loaded.
        has_begun: Whether this publish may have changed the reported version.
        has_loaded: Whether this publish may have changed the weights.
        is_overtaken: Whether the server was restarted during the publish, or another publisher has
            replaced its weights.
        paused_at: The time of the pause by the monotonic clock, or None while it generates.
        paused_seconds: How long generation was paused.
        digests: The digests that the server reported for the new weights, if any.
        packed: The packed layers, by name of the parameter.
        answers: The answers of a server with packed layers before the publish.
        has_changed: Whether packed layers differ between the files before and those published.
        is_partly_compared: Whether there are parameters whose digests differ from the files,
            which happens for packed layers.
        checked: What was compared, in words.
        notes: Sentences about what was not compared.
    """

    server: Server
    before: str | None = None
    base: str = ""
    base_path: str | None = None
    is_new: bool = True
    has_begun: bool = False
    has_loaded: bool = False
    is_overtaken: bool = False
    paused_at: float | None = None
    paused_seconds: float = 0.0
    digests: Mapping[str, str] | None = None
    packed: Mapping[str, PackedLayer] = field(default_factory=dict)
    answers: Answers | None = None
    has_changed: bool = False
    is_partly_compared: bool = False
    checked: str = VERSION_ONLY
    notes: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.server.client.url


def base_folder_of_server(update: Update, options: ServerOptions) -> Path | None:
    """Return the folder of the server's initial weights, or None if it is not seen from here."""
    base = Path(path_on_this_machine(update.base_path, options.visible_at))
    if base.is_absolute() and LocalStore(base).stat("config.json") is not None:
        return base
    return None


def resume(update: Update) -> None:
    """Resume generation if it is paused. Retries, because a server must not stay paused."""
    if update.paused_at is None:
        return
    for tries_left in range(_RESUME_TRIES - 1, -1, -1):
        try:
            update.server.resume()
            break
        except EngineError as error:
            if not tries_left:
                raise EngineError(
                    f"{error}; {update.url} may be PAUSED: resume it by hand"
                ) from None
            time.sleep(_RESUME_PAUSE_SECONDS)

    update.paused_seconds = time.monotonic() - update.paused_at
    update.paused_at = None


def expect_version(update: Update, expected: str | None) -> None:
    """Raise EngineError if the server reports another version than `expected`.

    A server that never reported a version passes.
    """
    reported = update.server.weight_version()
    if reported == expected or (reported is None and update.before is None):
        return
    # A server that reported a version before and reports none now did not answer this request.
    # This does not prove that it was overtaken.
    update.is_overtaken = reported is not None
    raise EngineError(
        f"{update.url}: reports the version {reported}, expected {expected}: it was "
        "restarted, or another publisher has replaced its weights"
    )


def expect_last_version(update: Update, weights: Weights) -> None:
    """Raise EngineError if the server does not report the version of the weights.

    Also records it in `update.checked` if nothing was compared, not even a version.
    """
    expect_version(update, weights.version)
    is_unchecked = update.checked == VERSION_ONLY and update.before is None
    if is_unchecked and update.server.weight_version() is None:
        update.checked = _UNREPORTED


def difference(update: Update, weights: Weights) -> str | None:
    """Describe how the digests of the server differ from those of the files.

    Returns None if they do not differ, or are not compared.
    """
    update.checked = VERSION_ONLY
    if weights.options.check == "listed":
        return None
    update.digests = _digests(update, weights.options)
    if not update.digests:
        return None
    comparison = compare_digests(update.digests, weights.file, weights.config)
    wrong_names = _find_wrong_parameters(update, update.digests, comparison)
    if wrong_names and is_known(weights.config):
        return (
            f"{update.url}: {wrong_names[0]}: its SHA-256 is not that of the files in "
            f"{weights.folder}, as of {len(wrong_names)} of {comparison.total} parameters; does "
            "the server see another copy of that folder?"
        )

    if comparison.equal:
        update.checked = _describe_comparison(comparison, update, update.digests)
    return None


def _digests(update: Update, options: ServerOptions) -> Mapping[str, str] | None:
    """Request the digests. The server is resumed for a moment if it needs this."""
    server = update.server
    digests = server.digests()
    # Some versions do not compute digests while they are paused.
    if digests == {} and update.paused_at is not None:
        server.resume()
        digests = server.digests()
        server.pause(options.in_flight)
    return digests


def _find_wrong_parameters(
    update: Update, digests: Mapping[str, str], comparison: DigestComparison
) -> list[str]:
    """Return the names of parameters that are not those of the files.

    A packed layer has another digest than the files. It is not wrong if its digest changed exactly
    if its tensors in the files changed. `update` records whether there are packed layers, and
    whether they changed.
    """
    wrong_names = []
    update.has_changed = False
    update.is_partly_compared = bool(comparison.different)
    for name, in_files in comparison.different.items():
        reported = digests[name]
        layer = update.packed.get(name)
        fits = layer is not None and layer.fits(reported, in_files)
        if not fits and not is_unreported(reported):
            wrong_names.append(name)
        if layer is not None and layer.has_changed(in_files):
            update.has_changed = True
    return wrong_names


def _describe_comparison(
    comparison: DigestComparison, update: Update, digests: Mapping[str, str]
) -> str:
    """Describe a comparison without wrong parameters, and the layers that it left out."""
    unreported = [name for name in comparison.different if is_unreported(digests[name])]
    reported = [name for name in comparison.different if not is_unreported(digests[name])]
    packed = [name for name in reported if name in update.packed]
    changed = [name for name in packed if digests[name] != update.packed[name].reported]
    lines = [comparison.counts]
    if unreported:
        lines.append(f"{len(unreported)} are kept in another layout, without digests")
    if packed and len(changed) == len(packed):
        lines.append(f"{len(packed)} are kept in another layout, changed with the update")
    elif packed:
        lines.append(
            f"{len(packed)} are kept in another layout, {len(changed)} of them changed with the "
            "update, as in the files"
        )

    return "; ".join(lines) + comparison.dropped


def expect_weights(update: Update, weights: Weights) -> None:
    """Raise EngineError if the server no longer holds the weights.

    Compares its digests and its served model with those that it had in the update. If it has packed
    layers, its answers are compared as well.
    """
    if update.digests:
        _expect_digests(update, update.digests)
    served = update.server.served()
    if (served.base, served.base_path) != (update.base, update.base_path):
        update.is_overtaken = True
        raise EngineError(
            f"{update.url}: serves {served.base} from {served.base_path}, expected {update.base} "
            f"from {update.base_path}: it was restarted with another model"
        )
    if update.is_partly_compared:
        _expect_answers(update, weights)


def _expect_digests(update: Update, expected: Mapping[str, str]) -> None:
    digests = update.server.digests() or {}
    changed = [name for name, digest in expected.items() if digests.get(name) != digest]
    if changed:
        update.is_overtaken = bool(digests)
        raise EngineError(
            f"{update.url}: {changed[0]}: its SHA-256 has changed since it was compared, as of "
            f"{len(changed)} of {len(expected)} parameters: it was restarted, or another "
            "publisher has replaced its weights"
        )


def _expect_answers(update: Update, weights: Weights) -> None:
    """Compare the answers of a server with packed layers. Raises EngineError for wrong ones."""
    answers = probe(update.server, update.base)
    notes = []
    if update.answers is not None:
        moved = distance(update.answers, answers)
        if update.has_changed and moved < EQUAL_WITHIN:
            raise EngineError(
                f"{update.url}: answers as before the update, although its layers have changed; it "
                "does not apply them, or they are too close to the weights before for three "
                "prompts: then check='listed'"
            )
        notes.append(f"answers differ from those before by up to {moved:.3f}")

    # A tied head is a packed copy of the embedding, and its digest is that of the embedding. So
    # digests do not prove that the head was replaced.
    if weights.config.get("tie_word_embeddings"):
        error = distance(weights.answers, answers)
        if error > 2 * ROUNDING:
            raise EngineError(
                f"{update.url}: its log probabilities are {error:.3f} from those of transformers, "
                f"expected at most {2 * ROUNDING}; it keeps a packed copy of the tied head, which "
                "it may not have replaced; start a server with this model"
            )
        notes.append(f"they are those of transformers within {error:.3f}")

    update.notes[:0] = notes


def unlike_servers(updates: Sequence[Update]) -> list[str]:
    """Return a line for each server whose parameters differ from those of a server like it.

    It is compared with the first server that has the same engine and names of parameters.
    """
    problems = []
    for update in updates:
        digests = update.digests or {}
        first = next(other for other in updates if _is_alike(other, update))
        first_digests = first.digests or {}
        names = [name for name, digest in digests.items() if digest != first_digests[name]]
        if names:
            problems.append(
                f"{update.url}: {names[0]}: one of {len(names)} parameters that differ "
                f"from those on {first.url}"
            )
    return problems


def _is_alike(update: Update, reference: Update) -> bool:
    """Check whether two servers have the same engine and report the same parameters."""
    if update.server.engine != reference.server.engine:
        return False
    return (update.digests or {}).keys() == (reference.digests or {}).keys()
