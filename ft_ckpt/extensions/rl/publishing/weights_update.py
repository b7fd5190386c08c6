"""One server whose full weights are replaced: its versions, digests and answers.

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

LOADING = " (loading)"  # after the version of a server whose weights are being replaced
FIRST_VERSION = "default"  # the version that vLLM and SGLang report for their initial weights
VERSION_ONLY = "the version only"
_UNREPORTED = "nothing: it reports neither digests nor a version"
_RESUME_TRIES, _RESUME_PAUSE_SECONDS = 4, 1.0


@dataclass(frozen=True)
class Weights:
    """Full weights to load, from open files."""

    version: str
    folder: ServedFolder
    checkpoint: Path
    file: TensorFile
    config: Mapping[str, Any]
    options: ServerOptions
    part: str = ""  # its name in the checkpoint

    @property
    def loading_version(self) -> str:
        return f"{self.version}{LOADING}"

    @cached_property
    def answers(self) -> Answers:
        """The answers of transformers to the prompts; loads the model."""
        from ft_ckpt.extensions.rl.engines import model_answers

        return model_answers(self.checkpoint, self.part)


@dataclass
class Update:
    """One server during a publish of weights."""

    server: Server
    before: str | None = None
    base: str = ""  # the served model name
    base_path: str | None = None  # the path of its initial weights
    is_new: bool = True
    has_begun: bool = False  # its reported version may differ from `before`
    has_loaded: bool = False  # its weights may differ from the previous ones, too
    # it was restarted meanwhile, or holds the weights of another publisher
    is_overtaken: bool = False
    paused_at: float | None = None
    paused_seconds: float = 0.0
    digests: Mapping[str, str] | None = None
    # linear layers that files cannot be compared with
    packed: Mapping[str, PackedLayer] = field(default_factory=dict)
    # answers before the update, of a server with packed layers
    answers: Answers | None = None
    has_changed: bool = False  # packed layers are others in the files than before the update
    is_partly_compared: bool = False  # it has packed layers
    checked: str = VERSION_ONLY
    notes: list[str] = field(default_factory=list)  # what was not compared

    @property
    def url(self) -> str:
        return self.server.client.url


def base_folder_of_server(update: Update, options: ServerOptions) -> Path | None:
    """Return the folder that the server was started with, if this machine sees it."""
    base = Path(path_on_this_machine(update.base_path, options.visible_at))
    is_seen = base.is_absolute() and LocalStore(base).stat("config.json") is not None
    return base if is_seen else None


def resume(update: Update) -> None:
    """Resume generation, with retries, because a server must not stay paused."""
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
    """Raise EngineError if the server reports another version; some servers report none."""
    reported = update.server.weight_version()
    if reported == expected or (reported is None and update.before is None):
        return
    # None, where it has reported one: it did not answer this once
    update.is_overtaken = reported is not None
    raise EngineError(
        f"{update.url}: reports the version {reported}, expected {expected}: it was "
        "restarted, or another publisher has replaced its weights"
    )


def expect_last_version(update: Update, weights: Weights) -> None:
    """Raise EngineError if the server does not report the version of the weights."""
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
    different = _unexplained(update, update.digests, comparison)
    if different and is_known(weights.config):
        return (
            f"{update.url}: {different[0]}: its SHA-256 is not that of the files in "
            f"{weights.folder}, as of {len(different)} of {comparison.total} parameters; does the "
            "server see another copy of that folder?"
        )
    if comparison.equal:
        update.checked = _in_words(comparison, update, update.digests)
    return None


def _digests(update: Update, options: ServerOptions) -> Mapping[str, str] | None:
    server = update.server
    digests = server.digests()
    # some versions do not compute them while paused
    if digests == {} and update.paused_at is not None:
        server.resume()
        digests = server.digests()
        server.pause(options.in_flight)
    return digests


def _unexplained(
    update: Update, digests: Mapping[str, str], comparison: DigestComparison
) -> list[str]:
    """Return the parameters with other digests than the files, without explained packed layers.

    A packed layer is explained if it changed with its tensors in the files. `update` records
    whether there are packed layers, and whether they changed.
    """
    unexplained = []
    update.has_changed = False
    update.is_partly_compared = bool(comparison.different)
    for name, in_files in comparison.different.items():
        reported, layer = digests[name], update.packed.get(name)
        if not is_unreported(reported) and (layer is None or not layer.fits(reported, in_files)):
            unexplained.append(name)
        if layer is not None and layer.has_changed(in_files):
            update.has_changed = True
    return unexplained


def _in_words(comparison: DigestComparison, update: Update, digests: Mapping[str, str]) -> str:
    """Describe a comparison without a difference, with the layers that it left out."""
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
    """Raise EngineError if digests, the served model or answers are not those of the update."""
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
    """Compare the answers of a server whose layers cannot all be compared.

    Raises EngineError for wrong ones.
    """
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
    # the head is a packed copy, and the digest that of the embedding
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
    """Return a line for each server whose parameters differ from those of its first twin.

    Twins have the same engine and names of parameters.
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
