"""Which checkpoint a save may replace."""

from collections.abc import Collection

from ft_ckpt.checkpoint import Manifest, load_manifest
from ft_ckpt.errors import ManifestError, TargetError
from ft_ckpt.storage import Place


def has_training_state(manifest: Manifest) -> bool:
    return any(part.kind == "state" for part in manifest.parts)


def refuse_replacing(target: Place, has_state: bool, run_ids: Collection[str] | None) -> None:
    """Raise TargetError if `target` holds a checkpoint that the save must not replace.

    A save without training state does not replace a checkpoint with it. With `run_ids`, the ids of
    a run, a save does not replace a checkpoint of another run. Raises UnreadableError if the
    manifest cannot be read just now.
    """
    try:
        manifest = load_manifest(target.folder)
    except ManifestError:
        return  # nothing committed, or damaged
    if has_training_state(manifest) and not has_state:
        raise TargetError(
            f"{target}: holds training state, which a save of weights alone would delete; save to "
            "another path"
        )
    if run_ids is not None and manifest.run_id is not None and manifest.run_id not in run_ids:
        raise TargetError(
            f"{target}: belongs to another run, {manifest.run_id[:6]}; use another directory, "
            "resume that run, or delete its checkpoints"
        )
