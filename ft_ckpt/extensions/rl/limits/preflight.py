"""Finds in the files of a checkpoint what an engine would refuse, drop or misread.

No server is needed. A finding is one line of text about it.
"""

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from ft_ckpt.checkpoint import hold_open
from ft_ckpt.checkpoint.manifest import PartRecord
from ft_ckpt.errors import CheckpointError, ConfigError, listing
from ft_ckpt.extensions.rl.limits.contents import settings_in
from ft_ckpt.extensions.rl.limits.full_weights import model_findings
from ft_ckpt.extensions.rl.limits.lora import adapter_findings, scale_findings
from ft_ckpt.formats.files import TensorFile
from ft_ckpt.messages import expected_one_of
from ft_ckpt.model.base import differing_elements
from ft_ckpt.model.files import open_folder
from ft_ckpt.storage import Store
from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage.places import Place, open_place

ENGINES = ("vllm", "sglang")
MAX_RANK = 16  # the limit of vLLM without --max-lora-rank


def check_for(
    engine: str, folder: str | os.PathLike[str] | Place, *, max_lora_rank: int = MAX_RANK
) -> list[str]:
    """Return the reasons why `engine` would not serve the adapter or model in `folder` as trained.

    `engine` is "vllm" or "sglang". Each reason is one line, with the field or file, its value, the
    expected value and the remedy. An empty list does not prove that the engine supports the
    architecture, because only a publish tries that. `max_lora_rank`: the engine's own setting.

    Raises ConfigError for an unknown engine, and the errors of opening the folder.
    """
    check_engine(engine)
    with hold_open(open_place(folder)) as place, closing(open_folder(place)) as file:
        return list(findings(engine, place.folder, file, max_lora_rank))


def check_engine(engine: str) -> None:
    """Raise ConfigError if the engine is unknown."""
    if engine not in ENGINES:
        raise ConfigError(f"engine={engine!r}: {expected_one_of(engine, ENGINES)}")


def findings(
    engine: str, store: Store, file: TensorFile, max_lora_rank: int = MAX_RANK
) -> Iterator[str]:
    """Yield the findings of `check_for` for an open folder."""
    settings = settings_in(store, "adapter_config.json")
    if settings is None:
        yield from model_findings(store, file)
        return
    if not any(stored.name.startswith("adapter_model.") for stored in store.list()):
        yield "adapter_model.safetensors: missing; expected beside adapter_config.json"
    yield from scale_findings(engine, settings)
    yield from adapter_findings(settings, file, max_lora_rank)


def needs_export(engine: str, store: Store) -> bool:
    """Check whether `engine` would scale the folder's adapter wrongly without an `export`."""
    settings = settings_in(store, "adapter_config.json") or {}
    return any(scale_findings(engine, settings))


def compare_base(record: PartRecord, base_path: str) -> tuple[list[str], str]:
    """Compare the server's base model, in the folder `base_path`, with the base of the adapter.

    Returns the findings, and the reason why nothing was compared. The reason is "" if the bases
    were compared.
    """
    if record.base is None or not record.base.fingerprint:
        return [], "the checkpoint has no record of it"
    path = Path(base_path)
    place = Place(LocalStore(path.parent), path.name)
    if not path.is_absolute() or not place.exists:
        return [], f"{base_path or 'the path of the server'} is not a folder here; see visible_at="
    try:
        with hold_open(place, compares=False) as opened, closing(open_folder(opened)) as file:
            compared, names = differing_elements(file, record)
    except (CheckpointError, OSError) as error:
        return [], str(error)

    if names:
        finding = (
            f"{listing(names, ', ', 3)}: {len(names)} of {len(record.base.fingerprint)} sampled "
            f"tensors of the base that the server holds, {base_path}, differ from the one that the "
            f"adapter was trained on ({record.base.id or 'built in memory'}); start the server "
            "with that base"
        )
        return [finding], ""

    return [], "" if compared else f"{base_path} has none of its sampled tensors"
