"""The saving functions of open-instruct's scripts, same names and arguments; change one import to use them.

A folder counts as complete when it holds open-instruct's own marker or our manifest.
"""

import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

import ft_ckpt
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME
from ft_ckpt.checkpoint.recovery import uncommit

_LOG = logging.getLogger(__name__)
_MARKER = "COMPLETED"
_NUMBER = re.compile(r"[+-]?\d+")


def save_with_accelerate(
    accelerator: Any,
    model: Any,
    tokenizer: Any,
    output_dir: str,
    use_lora: bool = False,
    model_attribute_to_save: str | None = None,
    chat_template_name: str | None = "tulu",
) -> None:
    """Save weights, config, generation config and tokenizer to `output_dir`; call it on every rank.

    `use_lora` saves the adapter only. `model_attribute_to_save` names the submodel to save, such as PPO's "policy".
    With "olmo" in `chat_template_name` the two EOS ids of that template go to the generation config; otherwise they
    are the tokenizer's. Unlike theirs, the live model is not changed, and the ids go to the submodel that is saved, not
    to the wrapper around it. Raises the errors of `CheckpointSaver.save`.
    """
    with ft_ckpt.CheckpointSaver(accelerator) as saver:
        saver.save(
            model,
            output_dir,
            adapter_only=use_lora,
            attribute=model_attribute_to_save,
            chat_template_name=chat_template_name or "tulu",  # theirs takes the tokenizer's tokens without a name too
            tokenizer=tokenizer,
        )


def get_last_checkpoint(folder: str, incomplete: bool = False) -> str | None:
    """Path of the `step_N` below `folder` with the largest N, or `epoch_N` where there are no steps; None without any.

    `incomplete` also takes folders that were not finished. Raises FileNotFoundError when there is no `folder`.
    """
    names = [entry.name for entry in Path(folder).iterdir()]
    steps = [name for name in names if name.startswith("step_")]
    chosen = steps or [name for name in names if name.startswith("epoch_")]
    if not incomplete:
        chosen = [name for name in chosen if _is_complete(Path(folder, name))]
    numbered = [name for name in chosen if _folder_number(name) is not None]
    if not numbered:
        return None
    return os.path.join(folder, max(numbered, key=_folder_order))  # noqa: PTH118 - the folder as it was spelt


def clean_last_n_checkpoints(output_dir: str, keep_last_n_checkpoints: int) -> None:
    """Delete all `step_N` and `epoch_N` folders below `output_dir` but the `keep_last_n_checkpoints` with largest N.

    A negative number keeps all. Folders without a number are left alone. Raises FileNotFoundError as above.
    """
    folders = [path for path in Path(output_dir).iterdir() if _is_checkpoint(path)]
    folders.sort(key=lambda path: _folder_order(path.name))
    if keep_last_n_checkpoints < 0:
        return
    for path in folders[: max(0, len(folders) - keep_last_n_checkpoints)]:
        _LOG.info("removing checkpoint %s", path)
        _delete_unmarked(path)


def _is_complete(path: Path) -> bool:
    return (path / _MARKER).exists() or (path / MANIFEST_NAME).exists()


def _is_checkpoint(path: Path) -> bool:
    return path.name.startswith(("step_", "epoch_")) and path.is_dir() and _folder_number(path.name) is not None


def _folder_number(name: str) -> int | None:
    tail = name.split("_")[-1]
    return int(tail) if _NUMBER.fullmatch(tail) else None


def _folder_order(name: str) -> int:
    return _folder_number(name) or 0


def _delete_unmarked(path: Path) -> None:
    """Both marks of completeness go first: a deletion that is interrupted leaves nothing that looks whole."""
    if path.is_symlink():
        return  # what it points to is not ours to delete
    try:
        (path / _MARKER).unlink(missing_ok=True)
        if (path / MANIFEST_NAME).exists():
            uncommit(path)
    except OSError as error:
        _LOG.warning("%s is kept, its marks of completeness cannot be removed: %s", path, error)
        return
    shutil.rmtree(path, ignore_errors=True)
