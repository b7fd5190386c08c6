"""Publishes to inference servers after a resume.

The servers may have other weights than the checkpoint from which the run continues.
"""

from collections.abc import Iterable
from dataclasses import replace

from ft_ckpt.checkpoint import text_identity
from ft_ckpt.checkpoint.catalog import CheckpointInfo, list_checkpoints
from ft_ckpt.checkpoint.checks import damage_of
from ft_ckpt.checkpoint.manifest import manifest_text
from ft_ckpt.errors import listing
from ft_ckpt.messages import LOG
from ft_ckpt.ranks import Ranks
from ft_ckpt.runs.loop import TrainingRun
from ft_ckpt.runs.saves.extension_parts import RunPublisher
from ft_ckpt.storage.places import Place


def publish_resumed(
    run: TrainingRun, publisher: RunPublisher, folders: Iterable[Place], ranks: Ranks
) -> None:
    """Publish the resumed checkpoint, or the version that the servers had when it was saved.

    `publisher.after_resume` decides between the two. `folders` are the folders of the run.
    Collective: call it on every rank. Returns when the publish has ended. After a fresh start
    nothing is published.
    """
    resumed = run.resumed_from
    if resumed is None:
        return

    def publish_on_leader() -> str:
        if not ranks.is_main:
            return ""
        place, note = resumed, ""
        if publisher.after_resume == "published":
            place, note = _last_published(run.published, resumed, folders)
            LOG.info("%s", note)
        publisher.begin(place).wait()
        return note

    text, error = ranks.attempt(publish_on_leader)
    note = ranks.agree("the publish of resume()", {"note": text}, error).result["note"]
    if note:
        run.report = replace(run.report, notes=(*run.report.notes, note))


def _last_published(
    version: str | None, resumed: Place, folders: Iterable[Place]
) -> tuple[Place, str]:
    """Return the checkpoint that the servers had when `resumed` was saved, and a sentence on it.

    `version` is its version. If the run has no intact checkpoint of this version, `resumed` itself
    is returned, and the sentence says why.
    """
    if version is None:
        reason = "it was saved before any version was published"
        return resumed, f"publishing {resumed.basename}: {reason}"

    reason = f"the run has no checkpoint of the version {version}"
    infos: list[CheckpointInfo] = []
    for folder in folders:
        infos += list_checkpoints(folder).checkpoints
    for info in infos:
        identity = text_identity(manifest_text(info.store).encode())
        version_of_weights = f"#{identity[:16]}"
        version_of_adapter = f"-{identity[:8]}"
        if not version.endswith((version_of_weights, version_of_adapter)):
            continue
        problems = damage_of(info.place, deep=True)
        if not problems:
            note = f"engines had it when {resumed.basename} was saved"
            return info.place, f"publishing {info.name}: {note}"
        reason = f"{info.name}, which has the version {version}, is damaged: {listing(problems)}"

    return resumed, f"publishing {resumed.basename}: {reason}"
