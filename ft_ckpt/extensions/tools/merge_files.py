"""Merged saves: stored or live adapters merged into their base, layer by layer.

The base is a model on its mapped files. PEFT attaches the adapters to it, and it is saved like any
merged model.
"""

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ft_ckpt.checkpoint import (
    BaseRecord,
    Manifest,
    OpenCheckpoint,
    PartRecord,
    checkpoint_around,
    describe_contents,
    files_in,
    hold_open,
    open_checkpoint,
)
from ft_ckpt.config import make_config
from ft_ckpt.errors import ConfigError, CorruptError, LoadError, SelectionError, listing
from ft_ckpt.extensions.tools.convert_folder import base_of_config
from ft_ckpt.extensions.tools.convert_request import ConvertOptions, check_apart, convert_options
from ft_ckpt.extensions.tools.converting import ConvertReport, open_source
from ft_ckpt.extensions.tools.logits import live_logits
from ft_ckpt.extensions.tools.merging import merged_part
from ft_ckpt.formats import (
    JoinedFile,
    TensorFile,
    TensorRecord,
    checkpoint_format_of,
    open_tensor_file,
)
from ft_ckpt.model import (
    FileModel,
    MergeChoice,
    WeightsFolder,
    attach_adapters,
    base_folder,
    find_base_class,
    finite_numbers,
    is_config_of_diffusers,
    is_quantised_folder,
    join_weight_files,
    merge_choice,
    model_on_file,
    model_on_files,
    stored_base_names,
    weight_files,
)
from ft_ckpt.ranks import Ranks
from ft_ckpt.saving import Attempt, SaveContext, SaveReport, request_of, run_save
from ft_ckpt.storage import (
    Place,
    Store,
    local_folder,
    open_place,
    read_range,
    read_text,
)

_CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class StoredAdapters:
    """Adapters of one base in one folder."""

    held: OpenCheckpoint
    records: tuple[PartRecord, ...]  # of the chosen adapters

    @property
    def base_names(self) -> frozenset[str]:
        """The names in the base of the tensors that the adapters store."""
        return frozenset(name for record in self.records for name in stored_base_names(record))

    @property
    def files(self) -> set[str]:
        """The paths of the files in the folders of the adapters, if the checkpoint is one of
        ours.
        """
        files: set[str] = set()
        for record in self.records:
            files |= files_in(self.held.manifest, record.path)
        return files

    @property
    def base_place(self) -> Place:
        """The place of their base if it is in the same checkpoint."""
        first = self.records[0]
        return Place(
            self.held.place.folder, first.path.removesuffix(f"adapters/{first.adapter}").rstrip("/")
        )

    @property
    def has_base(self) -> bool:
        return self.base_place.folder.stat("config.json") is not None


def find_adapters(place: Place, names: Sequence[str] | None, stack: ExitStack) -> StoredAdapters:
    """The adapters `names` at `place`, or the active ones, open until the stack ends.

    Raises ConfigError if `names` is not a list of names, LoadError if there are no adapters,
    SelectionError for unknown names and for an ambiguous choice.
    """
    if names is not None and not _are_names(names):
        raise ConfigError(f"adapters={names!r}: expected names of adapters, in a list")
    found = checkpoint_around(place)
    if found is not None:
        held = stack.enter_context(open_checkpoint(Place(found[0])))
        below = found[1]  # the folder of one adapter, or "" for all
        adapters = (record for record in held.manifest.parts if record.kind == "adapter")
        known = tuple(
            one for one in adapters if not below or f"{one.path}/".startswith(f"{below}/")
        )
    else:
        known = tuple(_foreign_records(place.folder))
        held = OpenCheckpoint(place, place.folder, Manifest(known, (), "adapter", ""), "")
    if not known:
        raise LoadError(
            f"{place}: {describe_contents(place).text}; expected a folder with an adapter "
            f"({_CONFIG})"
        )
    stored = StoredAdapters(held, _chosen_records(place, known, names))
    held.refuse_damaged(stored.files)
    return stored


def choose_merge(stored: StoredAdapters, weights: Sequence[float] | None) -> MergeChoice | None:
    """The choice of the stored adapters with their weights, if given.

    Raises ConfigError for weights that are not finite numbers in order, SelectionError for too few
    or too many.
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


def find_base(stored: StoredAdapters, given: Any) -> Place:
    """The folder of the base: `given`, the one in the same checkpoint, or the one that the adapters
    name.

    Raises LoadError if there is none, or if the adapters name several.
    """
    if given is not None:
        return open_place(given) if (found := base_folder(given, None)) is None else found
    if stored.has_base:
        return stored.base_place
    bases = {
        str(record.adapter): record.base or BaseRecord(None, None, "float32", "", {})
        for record in stored.records
    }
    samples = [dict(base.fingerprint) for base in bases.values()]
    are_one = bool(samples[0]) and all(found == samples[0] for found in samples)
    if len({(base.id, base.revision) for base in bases.values()}) > 1 and not are_one:
        wrong = [
            f"adapter {name!r}: on {base.id!r} (revision {base.revision})"
            for name, base in bases.items()
        ]
        raise LoadError(
            f"{listing(wrong)}; expected one base; merge them one by one, or "
            "name the base with base="
        )
    record, base = stored.records[0], bases[str(stored.records[0].adapter)]
    named = _adapter_settings(Place(stored.held.store, record.path).folder).get(
        "base_model_name_or_path"
    )
    for name in filter(None, (base.id, named if isinstance(named, str) else None)):
        if (folder := base_folder(name, base.revision)) is not None:
            return folder
    raise LoadError(
        f"adapter {record.adapter!r}: its base {base.id or named!r} is neither a folder here nor "
        "in the Hub's cache; name its folder with base="
    )


def _foreign_records(store: Store) -> Iterator[PartRecord]:
    """The adapters in a PEFT folder: "default" in the folder itself, others in subfolders with
    their names.
    """
    if store.stat(_CONFIG) is not None:
        yield _foreign_record(store, "", "default")
    for name in sorted(folder.name for folder in store.list_folder().folders):
        if store.stat(f"{name}/{_CONFIG}") is not None:
            yield _foreign_record(store.within(name), name, name)


def _foreign_record(store: Store, path: str, name: str) -> PartRecord:
    files, _ = weight_files(store, "adapter")
    if not files:
        raise CorruptError(
            f"{store.url}: {_CONFIG} without weights (adapter_model.safetensors); use another copy"
        )
    settings, file = _adapter_settings(store), f"{path}/{files[0]}".lstrip("/")
    with closing(join_weight_files(store, files)) as opened:
        tensors = tuple(
            TensorRecord(one.name, one.shape, one.dtype, file, 0, 0)
            for one in opened.specs.values()
        )
    facts = PartRecord(
        name, path, "adapter", checkpoint_format_of(files[0]).name, "PeftModel", tensors
    )
    return replace(facts, adapter=name, active=name == "default", base=base_of_config(settings))


def _adapter_settings(store: Store) -> dict[str, Any]:
    try:
        found = json.loads(read_text(store, _CONFIG))
    except ValueError as error:
        raise CorruptError(
            f"{store.where(_CONFIG)}: cannot be read ({error}); use another copy"
        ) from error
    return found if isinstance(found, dict) else {}


def _are_names(value: Any) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and all(isinstance(name, str) for name in value)
    )


def _chosen_records(
    path: Place, known: Sequence[PartRecord], names: Sequence[str] | None
) -> tuple[PartRecord, ...]:
    by_name = {str(record.adapter): record for record in known}
    if names is None:
        active = [record for record in known if record.active] or list(known)
        if len(active) > 1 and not any(record.active for record in known):
            raise SelectionError(
                f"{path}: holds the adapters {', '.join(by_name)}, none of them active; name some"
            )
        return tuple(active)
    if unknown := [name for name in names if name not in by_name]:
        raise SelectionError(
            f"adapter {', '.join(unknown)}: not in {path}, which has {', '.join(by_name)}"
        )
    return tuple(by_name[name] for name in names)


_TOKENIZER = re.compile(
    r"tokenizer|special_tokens|added_tokens|vocab\.|merges\.txt|spiece|chat_template|processor_config"
)
_TEMPLATES = "additional_chat_templates"  # the folder of a tokenizer's further templates, by name
# Rewritten, or belonging only to the base or to the adapters.
_NOT_TAKEN = re.compile(
    r"(config|generation_config|adapter_config)\.json$|README\.md$|(adapters|state)/|.*\.py$"
)


def merge(
    adapter: str | Path | Place,
    dst: str | Path | Place,
    *,
    base: str | Path | Place | None = None,
    adapters: Sequence[str] | None = None,
    weights: Sequence[float] | None = None,
    format: str | None = None,  # noqa: A002
    dtype: str | None = None,
    max_shard_size: int | str | None = None,
    check: str | Mapping[str, Any] | None = None,
    check_base: bool = True,
    overwrite: bool = False,
    progress: bool = True,
) -> ConvertReport:
    """Write the base of an adapter with the adapter merged into it to the folder `dst`; all or
    nothing, durably.

    `adapter`: a PEFT folder or an ft_ckpt checkpoint, with one or several adapters. The active ones
    are merged, or those named in `adapters`, each multiplied by its number in `weights`, if given.
    `base`: the folder of the base model; by default the one in the same checkpoint, or the one that
    the adapter names, if that is a folder on this machine or in the Hub's cache. It is compared
    with the samples in the adapter's manifest unless `check_base` is False. The adapter of a
    quantised base (QLoRA) is merged into the model that was quantised. `check`="logits", or a
    batch, runs both models before the folder is committed; fused experts are then in memory.
    `overwrite` as in `convert`.

    Layers are merged in float32 and rounded once to the base's type, or to `dtype`. The base is
    mapped, and one layer at a time is in memory. Sidecar files are the base's; the tokenizer is the
    adapter's if it has one. The manifest names the sources. The files of ft_ckpt checkpoints are
    compared with their digests first.

    Raises SelectionError naming all that cannot be merged; LoadError if there is no base, if the
    adapters name several, if settings or tensors of an adapter do not fit it, or if its
    initialisation changed the base in a way that cannot be repeated; BaseMismatchError if the base
    is another one; IncompleteError for NaN; for files as `convert` does.
    """
    begun = time.monotonic()
    options = convert_options(
        dst,
        format=format,
        dtype=dtype,
        max_shard_size=max_shard_size,
        verify=False,
        progress=progress,
        note="",
        to_folder=True,
        overwrite=overwrite,
    )
    with ExitStack() as stack:
        source = open_place(adapter)
        stored = find_adapters(source, adapters, stack)
        choice = choose_merge(stored, weights)
        found = find_base(stored, base)
        check_apart([source, found], options)
        place = stack.enter_context(hold_open(found))
        opened = stack.enter_context(closing(open_source(place)))
        based = base_on_files(place, found, stored, in_memory=check is not None)
        beside = stored.has_base and base is None
        sampled = check_base and not beside
        model, added = attach_adapters(
            based.model, stored.held, stored.records, check_base=sampled, base_is_stored=beside
        )
        given: dict[str, Any] = {"made_from": (source.basename, found.basename)}
        given["check"] = None if check is None else live_logits(model, check).compare
        given["extra_files"] = _companion_files(opened, stored)
        given["max_mode"] = place.mode_at(options.target)
        given["max_mode"] &= Place(stored.held.store).mode_at(options.target)
        report = _save_merged(model, options, choice, given, begun)
    left = (
        [f"{listing(list(based.left), ', ')}: the base's model has no place for it, left out"]
        if based.left
        else []
    )
    notes = (*left, *added, *report.notes)
    name, casts = options.format.name, report.casts
    return ConvertReport(
        options.path, name, report.bytes, report.tensors, report.seconds, casts, (), notes
    )


def _save_merged(
    model: Any,
    options: ConvertOptions,
    choice: MergeChoice | None,
    given: Mapping[str, Any],
    begun: float,
) -> SaveReport:
    """Save by this process alone, even inside a process group."""
    settings = {"dtype": options.dtype or "as_is", "format": options.format.name}
    config = make_config(
        None,
        {**settings, "max_shard_size": options.max_shard_bytes, "overwrite": options.overwrite},
    )
    own: dict[str, Any] = {"adapter_only": False, "step": None, "metrics": {}, "tokenizer": None}
    if choice is not None:
        own["merge"] = partial(merged_part, dtype=config.dtype, choice=choice)
    request = request_of(config, model, options.target, **own, **given)
    ranks = Ranks(0, 1, channel="" if options.progress else "quiet")
    return run_save(Attempt(lambda: request), SaveContext(ranks, config, begun))


def base_on_files(
    place: Place, found: Place, stored: StoredAdapters, *, in_memory: bool
) -> FileModel:
    """The base of `stored` on its mapped files, able to run if `in_memory`; `found` is the name of
    `place` in messages.

    Raises LoadError if there is no model, and for a quantised one.
    """
    names, _ = weight_files(place.folder, "model")
    if not names or place.folder.stat("config.json") is None:
        raise LoadError(
            f"{found}: no model of transformers in it; name the folder of the "
            "adapter's base with base="
        )
    config = json.loads(read_text(place.folder, "config.json"))
    if is_config_of_diffusers(config):
        file = JoinedFile([("", _open_mapped(place.folder, name)) for name in names], str(found))
        return FileModel(model_on_file(config, file, str(found)), ())
    with local_folder(place, lambda name: "/" not in name and name not in names) as folder:
        record = stored.records[0]
        settings = _adapter_settings(Place(stored.held.store, record.path).folder)
        base = find_base_class(str(folder), record, settings, trust_remote_code=False)
        if is_quantised_folder(folder):
            raise LoadError(
                f"{found}: its weights are quantised, expected those of the model that was "
                "quantised; name that model with base="
            )
        file = JoinedFile([("", _open_mapped(place.folder, name)) for name in names], str(found))
        model = model_on_files(folder, base, file, stored.base_names, in_memory=in_memory)
        base.complete(model.model)
        return model


def _open_mapped(store: Store, name: str) -> TensorFile:
    """A weight file whose tensors are mapped, if its format allows it."""
    known = checkpoint_format_of(name)
    if not name.endswith(known.suffixes):
        return open_tensor_file(store.open(name))
    mapped: TensorFile = known.open_file(store.open(name))
    return mapped


def _companion_files(opened: TensorFile, stored: StoredAdapters) -> dict[str, bytes]:
    """The sidecar files of the base, with the adapter's tokenizer if it has one."""
    taken: dict[str, Store] = {}
    if isinstance(opened, WeightsFolder):
        taken = {
            one.name: opened.store
            for one in opened.companions()[0]
            if not _NOT_TAKEN.match(one.name)
        }
    store = Place(stored.held.store, stored.records[0].path).folder
    templates = [
        f"{_TEMPLATES}/{one.name}" for one in store.within(_TEMPLATES).list_folder().objects
    ]
    own = [
        one.name for one in store.list_folder().objects if _TOKENIZER.search(one.name)
    ] + templates
    if any("tokenizer" in name for name in own):
        taken = {name: there for name, there in taken.items() if not _TOKENIZER.search(name)}
        taken |= dict.fromkeys(own, store)
    contents: dict[str, bytes] = {}
    for name, there in taken.items():
        with closing(there.open(name)) as file:
            contents[name] = read_range(file, 0, file.size_bytes)
    return contents
