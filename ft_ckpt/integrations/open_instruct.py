"""Replaces the saving functions of open-instruct's scripts.

The functions have the same names and arguments, so a script only changes one import. A folder
counts as complete if it has open-instruct's own marker or a manifest of ft_ckpt.
"""

import re
from operator import itemgetter
from pathlib import Path
from typing import Any

import ft_ckpt
from ft_ckpt.checkpoint.commit import uncommit
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME
from ft_ckpt.errors import MissingError
from ft_ckpt.messages import LOG
from ft_ckpt.storage import Folder, Stored
from ft_ckpt.storage.local import LocalStore

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

    With `use_lora` only the adapter is saved. `model_attribute_to_save` names the submodel to save,
    such as PPO's "policy". The EOS ids are written to the generation config. With "olmo" in
    `chat_template_name` these are the two ids of that template, otherwise those of the tokenizer.

    There are two differences from open-instruct's function. The live model is not changed. The ids
    are written for the submodel that is saved, and not for the wrapper around it. Raises the errors
    of `CheckpointSaver.save`.
    """
    with ft_ckpt.CheckpointSaver(accelerator) as saver:
        saver.save(
            model,
            output_dir,
            adapter_only=use_lora,
            attribute=model_attribute_to_save,
            chat_template_name=chat_template_name or "tulu",  # None is treated as in open-instruct
            tokenizer=tokenizer,
        )


def get_last_checkpoint(folder: str, incomplete: bool = False) -> str | None:
    """Return the path of the `step_N` in `folder` with the largest N.

    If there is no name that begins with "step_", it is the `epoch_N` with the largest N. Returns
    None if there is none. With `incomplete`, folders that are not complete count, too. Raises
    FileNotFoundError when there is no `folder`.
    """
    names = [entry.name for entry in _entries(folder)]
    candidates = [name for name in names if name.startswith("step_")]
    if not candidates:
        candidates = [name for name in names if name.startswith("epoch_")]
    last_name: str | None = None
    last_number = 0
    for name in candidates:
        number = _folder_number(name)
        if number is None or not (incomplete or _is_complete(Path(folder, name))):
            continue
        if last_name is None or number > last_number:
            last_name, last_number = name, number

    if last_name is None:
        return None
    prefix = folder if folder.endswith("/") else f"{folder}/"
    return prefix + last_name


def _is_complete(folder: Path) -> bool:
    store = LocalStore(folder)
    return bool(store.stat(_MARKER) or store.stat(MANIFEST_NAME))


def clean_last_n_checkpoints(output_dir: str, keep_last_n_checkpoints: int) -> None:
    """Delete the `step_N` and `epoch_N` folders in `output_dir`, except the last ones.

    As many as `keep_last_n_checkpoints` with the largest N stay. A negative number keeps all.
    Folders without a number stay. Raises FileNotFoundError when there is no `output_dir`.
    """
    numbered: list[tuple[int, Folder]] = []
    for entry in _entries(output_dir):
        number = _folder_number(entry.name)
        is_checkpoint = entry.name.startswith(("step_", "epoch_"))
        if isinstance(entry, Folder) and is_checkpoint and number is not None:
            numbered.append((number, entry))

    if keep_last_n_checkpoints < 0:
        return
    numbered.sort(key=itemgetter(0))
    for _, folder in numbered[: max(0, len(numbered) - keep_last_n_checkpoints)]:
        path = Path(output_dir, folder.name)
        LOG.info("removing checkpoint %s", path)
        if not folder.is_link:  # the folder that a link refers to stays
            _delete_folder(path)


def _entries(folder: str) -> tuple[Folder | Stored, ...]:
    listed = LocalStore(Path(folder)).list_folder()
    if not listed.exists:
        raise MissingError(f"{folder}: no such folder; name the one that the script saves to")
    return *listed.folders, *listed.objects


def _folder_number(name: str) -> int | None:
    tail = name.split("_")[-1]
    return int(tail) if _NUMBER.fullmatch(tail) else None


def _delete_folder(path: Path) -> None:
    """Delete a folder. The marker and the manifest are deleted first.

    Therefore, after an interrupted deletion, what is left does not count as complete.
    """
    store = LocalStore(path)
    try:
        store.delete([_MARKER])
        if store.stat(MANIFEST_NAME) is not None:
            uncommit(path)
    except OSError as error:
        LOG.warning("%s is kept, its marks of completeness cannot be removed: %s", path, error)
        return
    store.delete_all()
