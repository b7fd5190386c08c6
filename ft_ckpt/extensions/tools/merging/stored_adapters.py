"""Finds stored adapters to merge, and the base that they name.

A place is a folder on a disk or a prefix in a bucket. A record describes one part of a checkpoint:
here, one adapter in its folder. Adapters that PEFT saved have no manifest, so records are made for
them from their files.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

from ft_ckpt.checkpoint import OpenCheckpoint, checkpoint_around, files_in, open_checkpoint
from ft_ckpt.checkpoint.manifest import BaseRecord, Manifest, PartRecord, describe_contents
from ft_ckpt.errors import ConfigError, CorruptError, LoadError, SelectionError, listing
from ft_ckpt.extensions.tools.converting import base_of_config
from ft_ckpt.formats import TensorRecord, checkpoint_format_of
from ft_ckpt.model.base import base_folder, cached_base
from ft_ckpt.model.files import join_weight_files, weight_files
from ft_ckpt.model.tensors import MergeChoice, finite_numbers, merge_choice
from ft_ckpt.storage import Store, read_text
from ft_ckpt.storage.places import Place

_CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class StoredAdapters:
    """The chosen adapters in one folder, all of one base."""

    checkpoint: OpenCheckpoint
    records: tuple[PartRecord, ...]

    @property
    def folder(self) -> Store:
        """The folder of the first adapter."""
        return Place(self.checkpoint.store, self.records[0].path).folder

    @property
    def settings(self) -> dict[str, Any]:
        """The config of the first adapter."""
        return _read_config(self.folder)

    @property
    def files(self) -> set[str]:
        """The paths of the adapters' files. There are none in a folder that PEFT saved."""
        files: set[str] = set()
        for record in self.records:
            files |= files_in(self.checkpoint.manifest, record.path)
        return files

    @property
    def base_place(self) -> Place:
        """The place where the base is if it is in the same checkpoint; see `has_base`."""
        first = self.records[0]
        path = first.path.removesuffix(f"adapters/{first.adapter}").rstrip("/")
        return Place(self.checkpoint.place.folder, path)

    @property
    def has_base(self) -> bool:
        """Whether the base is in the same checkpoint."""
        return self.base_place.folder.stat("config.json") is not None


def find_adapters(place: Place, names: Sequence[str] | None, stack: ExitStack) -> StoredAdapters:
    """Open the adapters `names` at `place`, or the active adapters if `names` is None.

    The exit of `stack` closes the checkpoint. Raises ConfigError if `names` is not a list of names,
    LoadError if there are no adapters, and SelectionError for unknown names, or if `names` is None
    and none of several adapters is active.
    """
    if names is not None and not _are_names(names):
        raise ConfigError(f"adapters={names!r}: expected names of adapters, in a list")
    around = checkpoint_around(place)
    if around is not None:
        # `folder` is a path in the checkpoint: one adapter's, or "" for the whole checkpoint.
        root, folder = around
        checkpoint = stack.enter_context(open_checkpoint(Place(root)))
        records = _adapter_records(checkpoint.manifest, folder)
    else:
        records = _records_of_peft_folder(place.folder)
        manifest = Manifest(tuple(records), (), "adapter", "")
        checkpoint = OpenCheckpoint(place, place.folder, manifest, "")

    if not records:
        raise LoadError(
            f"{place}: {describe_contents(place).text}; expected a folder with an adapter "
            f"({_CONFIG})"
        )

    stored = StoredAdapters(checkpoint, _chosen_records(place, records, names))
    checkpoint.refuse_damaged(stored.files)
    return stored


def _adapter_records(manifest: Manifest, folder: str) -> list[PartRecord]:
    """Return the records of the adapters in `folder`, a path in the checkpoint."""
    records = []
    for record in manifest.parts:
        is_below = not folder or f"{record.path}/".startswith(f"{folder}/")
        if record.kind == "adapter" and is_below:
            records.append(record)
    return records


def choose_merge(stored: StoredAdapters, weights: Sequence[float] | None) -> MergeChoice | None:
    """Return which adapters to merge, with which weights.

    Raises ConfigError unless `weights` is None or a list of finite numbers. Raises SelectionError
    unless there is one for each adapter.
    """
    names = [str(record.adapter) for record in stored.records]
    if weights is None:
        return merge_choice(names)
    numbers = finite_numbers(weights)
    if not numbers:
        raise ConfigError(
            f"weights={weights!r}: expected a finite number for each of "
            f"{', '.join(names)}, in a list"
        )
    if len(numbers) != len(names):
        raise SelectionError(f"weights={numbers}: expected a number for each of {', '.join(names)}")
    return merge_choice(dict(zip(names, numbers, strict=True)))


def find_base(stored: StoredAdapters, base: Place | None) -> Place:
    """Find the folder of the base to merge into.

    It is `base` if given, else the base in the same checkpoint, else the base that the adapters
    name. Raises LoadError if there is none, or if the adapters name several.
    """
    if base is not None:
        return base if base.is_folder else cached_base(str(base), None) or base
    if stored.has_base:
        return stored.base_place
    bases = {}
    for record in stored.records:
        unknown_base = BaseRecord(None, None, "float32", "", {})
        bases[str(record.adapter)] = record.base or unknown_base

    _refuse_several_bases(bases)
    adapter = str(stored.records[0].adapter)
    recorded_base = bases[adapter]
    id_in_config = stored.settings.get("base_model_name_or_path")
    for base_id in (recorded_base.id, id_in_config):
        if base_id and isinstance(base_id, str):
            folder = base_folder(base_id, recorded_base.revision)
            if folder is not None:
                return folder

    raise LoadError(
        f"adapter {adapter!r}: its base {recorded_base.id or id_in_config!r} is neither a folder "
        "here nor in the Hub's cache; name its folder with base="
    )


def _refuse_several_bases(bases: Mapping[str, BaseRecord]) -> None:
    """Raise LoadError if the adapters, by name, have different bases."""
    ids = {(base.id, base.revision) for base in bases.values()}
    if len(ids) < 2:
        return
    fingerprints = [dict(base.fingerprint) for base in bases.values()]
    if fingerprints[0] and all(other == fingerprints[0] for other in fingerprints):
        return  # one base under several names
    problems = []
    for adapter, base in bases.items():
        problems.append(f"adapter {adapter!r}: on {base.id!r} (revision {base.revision})")
    raise LoadError(
        f"{listing(problems)}; expected one base; merge them one by one, or "
        "name the base with base="
    )


def _records_of_peft_folder(store: Store) -> list[PartRecord]:
    """Return the adapters that PEFT saved: "default" in the folder itself, others in subfolders."""
    records = []
    if store.stat(_CONFIG) is not None:
        records.append(_record_of_peft_adapter(store, "", "default"))
    for name in sorted(folder.name for folder in store.list_folder().folders):
        if store.stat(f"{name}/{_CONFIG}") is not None:
            records.append(_record_of_peft_adapter(store.within(name), name, name))
    return records


def _record_of_peft_adapter(store: Store, path: str, name: str) -> PartRecord:
    """Return a record of the adapter in the folder `store`.

    `path` is the path of that folder in the folder of all adapters. Raises CorruptError for a
    config without weights, or for one that cannot be parsed.
    """
    files, _ = weight_files(store, "adapter")
    if not files:
        raise CorruptError(
            f"{store.url}: {_CONFIG} without weights (adapter_model.safetensors); use another copy"
        )

    file = f"{path}/{files[0]}".lstrip("/")
    tensors = []
    with closing(join_weight_files(store, files)) as tensor_file:
        for spec in tensor_file.specs.values():
            tensors.append(TensorRecord(spec.name, spec.shape, spec.dtype, file, 0, 0))

    format_name = checkpoint_format_of(files[0]).name
    record = PartRecord(name, path, "adapter", format_name, "PeftModel", tuple(tensors))
    base = base_of_config(_read_config(store))
    return replace(record, adapter=name, active=name == "default", base=base)


def _read_config(store: Store) -> dict[str, Any]:
    """Read the adapter's config. Returns {} for JSON that is no object."""
    try:
        settings = json.loads(read_text(store, _CONFIG))
    except ValueError as error:
        raise CorruptError(
            f"{store.where(_CONFIG)}: cannot be read ({error}); use another copy"
        ) from error
    return settings if isinstance(settings, dict) else {}


def _are_names(value: Any) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return is_list and all(isinstance(name, str) for name in value)


def _chosen_records(
    place: Place, records: Sequence[PartRecord], names: Sequence[str] | None
) -> tuple[PartRecord, ...]:
    """Return the records of the adapters `names`, or of the active ones; see `find_adapters`."""
    by_name = {str(record.adapter): record for record in records}
    if names is None:
        active = [record for record in records if record.active]
        if not active and len(records) > 1:
            raise SelectionError(
                f"{place}: holds the adapters {', '.join(by_name)}, none of them active; name some"
            )
        return tuple(active or records)

    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise SelectionError(
            f"adapter {', '.join(unknown)}: not in {place}, which has {', '.join(by_name)}"
        )

    return tuple(by_name[name] for name in names)
