"""Merges stored adapters into a stored base, layer by layer, into one plain model; neither is ever whole in memory.

The base is a model on its mapped files, PEFT puts the adapters onto it, and the rest is the road of any merged save.
"""

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from ft_ckpt.checkpoint.open_checkpoint import hold_open
from ft_ckpt.config import make_config
from ft_ckpt.distributed.ranks import Ranks
from ft_ckpt.errors import LoadError, listing
from ft_ckpt.files.convert import ConvertReport, open_source
from ft_ckpt.files.convert_options import ConvertOptions, check_apart, convert_options
from ft_ckpt.files.folder import JoinedFile, WeightsFolder, weight_files
from ft_ckpt.formats.detect import open_tensor_file
from ft_ckpt.formats.layout import TensorFile
from ft_ckpt.formats.registry import checkpoint_format_of
from ft_ckpt.model.attach_adapters import attach_adapters
from ft_ckpt.model.file_model import FileModel, dequantised_model, is_quantised_folder, model_on_files
from ft_ckpt.saving.check_logits import live_logits
from ft_ckpt.saving.execute import run_save
from ft_ckpt.saving.move_tensors import SharedFolders
from ft_ckpt.saving.request import SaveRequest, request_of
from ft_ckpt.saving.stored_adapters import StoredAdapters, choose_merge, find_adapters, find_base
from ft_ckpt.storage.local_copy import local_folder
from ft_ckpt.storage.place import Place, open_place, source_access
from ft_ckpt.storage.store import Store, read_range

_TOKENIZER = re.compile(
    r"tokenizer|special_tokens|added_tokens|vocab\.|merges\.txt|spiece|chat_template|processor_config"
)
# Made anew, of the base alone, or of the adapters.
_NOT_TAKEN = re.compile(r"(config|generation_config|adapter_config)\.json$|README\.md$|(adapters|state)/|.*\.py$")


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
    dequantize: bool = False,
    overwrite: bool = False,
    progress: bool = True,
) -> ConvertReport:
    """Write the base of an adapter with the adapter merged into it to the folder `dst`; all or nothing, durably.

    `adapter` is a folder of PEFT's or a checkpoint of ours, which may hold several: those that were active are merged,
    or those named in `adapters`, each times its number in `weights`, where these are given. `base` is the folder of the
    base model; by default it is the one beside the adapters in their checkpoint, or the one that the adapter names, if
    that is a folder here or in the Hub's cache. Samples of the base that the adapter's manifest has are compared,
    unless `check_base` is off. Layers are merged in float32 and rounded once to the base's type, or to `dtype`; the
    base is mapped, one layer at a time is in memory. A base that is quantised is refused, or with `dequantize`
    merged as what it stands for, in memory. Companions are the base's, the tokenizer is the adapter's if it has one.
    `check`="logits", or a batch, runs both models before the folder is committed, for which fused experts come into
    memory. The manifest says what the model was made from. Checkpoints of ours are compared with their digests as they
    are read. `overwrite` is that of `convert`.

    Raises SelectionError naming all that cannot be merged, LoadError if there is no base, if the adapters name several,
    if an adapter's settings or tensors do not fit it, or if initialising the adapter changed it in a way that cannot be
    repeated, BaseMismatchError for another base, IncompleteError for NaN; for files as `convert` does.
    """
    begun = time.monotonic()
    options = convert_options(
        dst, format=format, dtype=dtype, max_shard_size=max_shard_size, verify=False, progress=progress, note="",
        to_folder=True, overwrite=overwrite,
    )  # fmt: skip
    with ExitStack() as stack:
        source = open_place(adapter)
        stored = find_adapters(source, adapters, stack)
        choice = choose_merge(stored, weights)
        found = find_base(stored, base)
        check_apart([source, found], options)
        place = stack.enter_context(hold_open(found))
        opened = stack.enter_context(closing(open_source(place, found)))
        based = base_on_files(place, found, dequantize=dequantize, in_memory=check is not None)
        beside = stored.has_base and base is None
        sampled = check_base and not beside
        model, added = attach_adapters(based.model, stored.held, stored.records, check_base=sampled, beside=beside)
        given: dict[str, Any] = {"merged": choice, "made_from": (source.last_step, found.last_step)}
        given["check"] = None if check is None else live_logits(model, check)
        given["extra_files"] = _companion_files(opened, stored)
        given["access"] = source_access(place, found, options.target)
        given["access"] &= source_access(Place(stored.held.store), Place(stored.held.origin), options.target)
        report = _save_merged(model, options, given, begun)
    left = [f"{listing(list(based.left), ', ')}: the base's model has no place for it, left out"] if based.left else []
    notes = (*left, *added, *report.notes)
    name, casts = options.format.name, report.casts
    return ConvertReport(options.path, name, report.bytes, report.tensors, report.seconds, casts, (), notes)


def _save_merged(model: Any, options: ConvertOptions, given: Mapping[str, Any], begun: float) -> Any:
    """Save by this process alone, whatever group it is in."""
    settings = {"dtype": options.dtype or "as_is", "format": options.format.name}
    config = make_config(None, {**settings, "max_shard_size": options.max_shard_bytes, "overwrite": options.overwrite})
    own: dict[str, Any] = {"adapter_only": False, "step": None, "metrics": {}, "tokenizer": None}
    request: SaveRequest = request_of(config, model, options.target, **own, **given)
    ranks = Ranks(0, 1, channel="" if options.progress else "quiet")
    return run_save(request, None, ranks, config, begun, None, SharedFolders())


def base_on_files(place: Place, found: Place, *, dequantize: bool, in_memory: bool) -> FileModel:
    """The base on its files, `in_memory` one that can run; `found` is what people call the `place`.

    Raises LoadError for what is no model, and for one that is quantised unless told to `dequantize`.
    """
    names, _ = weight_files(place.folder, "model")
    if not names or place.folder.stat("config.json") is None:
        raise LoadError(f"{found}: no model of transformers in it; name the folder of the adapter's base with base=")
    with local_folder(place, lambda name: "/" not in name and (dequantize or name not in names)) as folder:
        if not is_quantised_folder(folder):
            file = JoinedFile([("", _open_mapped(place.folder, name)) for name in names], str(found))
            return model_on_files(folder, file, in_memory=in_memory)
        if not dequantize:
            raise LoadError(
                f"{found}: its weights are quantised; name the model that they were made from with base=, or merge "
                "into what they stand for, with the errors of quantising, with dequantize=True"
            )
        return dequantised_model(folder)


def _open_mapped(store: Store, name: str) -> TensorFile:
    """A weight file whose tensors are mapped, if its format allows it."""
    known = checkpoint_format_of(name)
    if not name.endswith(known.suffixes):
        return open_tensor_file(store.open(name))
    mapped: TensorFile = known.open_file(store.open(name))
    return mapped


def _companion_files(opened: TensorFile, stored: StoredAdapters) -> dict[str, bytes]:
    """Files that go along: the base's, with the adapter's tokenizer if there is one."""
    taken: dict[str, Store] = {}
    if isinstance(opened, WeightsFolder):
        taken = {one.name: opened.store for one in opened.companions()[0] if not _NOT_TAKEN.match(one.name)}
    store = Place(stored.held.store, stored.records[0].path).folder
    own = [one.name for one in store.list_folder().objects if _TOKENIZER.search(one.name)]
    if any("tokenizer" in name for name in own):
        taken = {name: there for name, there in taken.items() if not _TOKENIZER.search(name)}
        taken |= dict.fromkeys(own, store)
    return {name: _read_companion(there, name) for name, there in taken.items()}


def _read_companion(store: Store, name: str) -> bytes:
    with closing(store.open(name)) as file:
        return read_range(file, 0, file.size_bytes)
