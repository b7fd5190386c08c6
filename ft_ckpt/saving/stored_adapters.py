"""Finds adapters in folders of PEFT's or in checkpoints of ours, and the base that they belong to."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from ft_ckpt.checkpoint.manifest import BaseRecord, Manifest, PartRecord
from ft_ckpt.checkpoint.open_checkpoint import OpenCheckpoint, checkpoint_around, open_checkpoint
from ft_ckpt.errors import CorruptError, LoadError, SelectionError, listing
from ft_ckpt.files.folder import join_weight_files, weight_files
from ft_ckpt.formats.layout import TensorRecord
from ft_ckpt.formats.registry import checkpoint_format_of
from ft_ckpt.model.merge_choice import MergeChoice, merge_choice
from ft_ckpt.storage.place import Place, open_place
from ft_ckpt.storage.store import Store, read_text

_CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class StoredAdapters:
    """Adapters of one base that lie in one folder."""

    held: OpenCheckpoint
    records: tuple[PartRecord, ...]  # of those that are chosen

    @property
    def base_place(self) -> Place:
        """Where their base is, if it lies beside them, in the same checkpoint."""
        first = self.records[0]
        return Place(self.held.origin, first.path.removesuffix(f"adapters/{first.adapter}").rstrip("/"))

    @property
    def has_base(self) -> bool:
        """Whether their base lies beside them."""
        return self.base_place.folder.stat("config.json") is not None


def find_adapters(place: Place, names: Sequence[str] | None, stack: ExitStack) -> StoredAdapters:
    """The adapters `names` at `place`, or those that were active, held open until the stack ends.

    Raises LoadError where there are none, SelectionError for names that are not there and where a choice is left.
    """
    found = checkpoint_around(place)
    if found is not None:
        held = stack.enter_context(open_checkpoint(Place(found[0])))
        known = tuple(_own_records(held.manifest, found[1]))
    else:
        known = tuple(_foreign_records(place.folder))
        held = OpenCheckpoint(place.folder, place.folder, Manifest(known, (), "adapter", ""), "")
    if not known:
        raise LoadError(f"{place}: no adapter in it (no {_CONFIG}); give the folder of one")
    return StoredAdapters(held, _chosen_records(place, known, names))


def choose_merge(stored: StoredAdapters, weights: Sequence[float] | None) -> MergeChoice | None:
    """What to merge: the stored adapters, by their weights if they have any. Raises ConfigError for their number."""
    names = [str(record.adapter) for record in stored.records]
    if weights is None:
        return merge_choice(names)
    if len(weights) != len(names):
        raise SelectionError(f"weights={list(weights)}: expected a number for each of {', '.join(names)}")
    return merge_choice(dict(zip(names, weights, strict=True)))


def find_base(stored: StoredAdapters, given: Any) -> Place:
    """The folder of the base: `given`, the one beside the adapters, or the one they name.

    Raises LoadError if there is none, and if the adapters name several.
    """
    if given is not None:
        return open_place(given) if (found := _base_folder(given, None)) is None else found
    if stored.has_base:
        return stored.base_place
    bases = {str(record.adapter): record.base or BaseRecord(None, None, "float32", "", {}) for record in stored.records}
    samples = [dict(base.fingerprint) for base in bases.values()]
    are_one = bool(samples[0]) and all(found == samples[0] for found in samples)
    if len({(base.id, base.revision) for base in bases.values()}) > 1 and not are_one:
        wrong = [f"adapter {name!r}: on {base.id!r} (revision {base.revision})" for name, base in bases.items()]
        raise LoadError(f"{listing(wrong)}; expected one base; merge them one by one, or name the base with base=")
    record, base = stored.records[0], bases[str(stored.records[0].adapter)]
    named = _adapter_settings(Place(stored.held.store, record.path).folder).get("base_model_name_or_path")
    for name in filter(None, dict.fromkeys((base.id, named))):
        if (folder := _base_folder(str(name), base.revision)) is not None:
            return folder
    raise LoadError(
        f"adapter {record.adapter!r}: its base {base.id or named!r} is no folder here, nor in the Hub's cache; name "
        "its folder with base="
    )


def _base_folder(name: str | os.PathLike[str] | Place, revision: str | None) -> Place | None:
    """A folder of this machine, or of the Hub's cache on it."""
    place = open_place(name)
    if place.is_folder:
        return place
    with suppress(LocalEntryNotFoundError, HFValidationError, HfHubHTTPError, ValueError):
        return open_place(snapshot_download(str(name), revision=revision, local_files_only=True))
    return None


def _own_records(manifest: Manifest, below: str) -> Iterator[PartRecord]:
    for record in manifest.parts:
        if record.kind == "adapter" and (not below or record.path == below or record.path.startswith(f"{below}/")):
            yield record


def _foreign_records(store: Store) -> Iterator[PartRecord]:
    """The adapters in a folder of PEFT's: "default" in it, others in folders of their names."""
    if store.stat(_CONFIG) is not None:
        yield _foreign_record(store, "", "default")
    for name in sorted(folder.name for folder in store.list_folder().folders):
        if store.stat(f"{name}/{_CONFIG}") is not None:
            yield _foreign_record(store.within(name), name, name)


def _foreign_record(store: Store, path: str, name: str) -> PartRecord:
    files, _ = weight_files(store, "adapter")
    if not files:
        raise CorruptError(f"{store.url}: {_CONFIG} without weights (adapter_model.safetensors); use another copy")
    settings, file = _adapter_settings(store), f"{path}/{files[0]}".lstrip("/")
    with closing(join_weight_files(store, files)) as opened:
        tensors = tuple(TensorRecord(one.name, one.shape, one.dtype, file, 0, 0) for one in opened.specs.values())
    base = BaseRecord(settings.get("base_model_name_or_path"), settings.get("revision"), "float32", "", {})
    facts = PartRecord(name, path, "adapter", checkpoint_format_of(files[0]).name, "PeftModel", tensors)
    return replace(facts, adapter=name, active=name == "default", base=base)


def _adapter_settings(store: Store) -> dict[str, Any]:
    try:
        found = json.loads(read_text(store, _CONFIG))
    except ValueError as error:
        raise CorruptError(f"{store.where(_CONFIG)}: cannot be read ({error}); use another copy") from error
    return found if isinstance(found, dict) else {}


def _chosen_records(path: Place, known: Sequence[PartRecord], names: Sequence[str] | None) -> tuple[PartRecord, ...]:
    by_name = {str(record.adapter): record for record in known}
    if names is None:
        active = [record for record in known if record.active] or list(known)
        if len(active) > 1 and not any(record.active for record in known):
            raise SelectionError(f"{path}: holds the adapters {', '.join(by_name)}, none of them active; name some")
        return tuple(active)
    if unknown := [name for name in names if name not in by_name]:
        raise SelectionError(f"adapter {', '.join(unknown)}: not in {path}, which has {', '.join(by_name)}")
    return tuple(by_name[name] for name in names)
