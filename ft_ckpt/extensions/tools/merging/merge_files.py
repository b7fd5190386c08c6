"""Merges stored adapters into their base, layer by layer.

The base is a model on its mapped files. PEFT attaches the adapters to it, and it is saved like any
merged model.
"""

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

from ft_ckpt.checkpoint import hold_open
from ft_ckpt.config import make_config
from ft_ckpt.errors import listing
from ft_ckpt.extensions.tools.converting import (
    ConvertOptions,
    ConvertReport,
    check_apart,
    convert_options,
    open_source,
)
from ft_ckpt.extensions.tools.merging.live_merge import merged_part
from ft_ckpt.extensions.tools.merging.logits import live_logits
from ft_ckpt.extensions.tools.merging.stored_adapters import (
    StoredAdapters,
    choose_merge,
    find_adapters,
    find_base,
)
from ft_ckpt.formats.files import TensorFile
from ft_ckpt.model.base import base_on_files
from ft_ckpt.model.files import WeightsFolder
from ft_ckpt.model.load import attach_adapters
from ft_ckpt.model.tensors import MergeChoice
from ft_ckpt.ranks import Ranks
from ft_ckpt.saving import Attempt, SaveContext, run_save
from ft_ckpt.saving.planning import SaveReport, request_of
from ft_ckpt.storage import Store, read_range
from ft_ckpt.storage.places import Place, open_place

_TOKENIZER = re.compile(
    r"tokenizer|special_tokens|added_tokens|vocab\.|merges\.txt|spiece|chat_template|processor_config"
)
_TEMPLATES = "additional_chat_templates"  # the folder of a tokenizer's further templates, by name
# Rewritten, or belonging only to the base or to the adapters.
_NOT_COPIED = re.compile(
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
    """Write the base of an adapter with the adapter merged into it to the folder `dst`.

    A failed call leaves nothing; a result is durable. `adapter` is a PEFT folder or an ft_ckpt
    checkpoint, with one or several adapters. The active ones are merged, or those named in
    `adapters`, each multiplied by its number in `weights`, if given. `base` is the folder of the
    base model; by default the one in the same checkpoint, or the one that the adapter names, if
    that is a folder on this machine or in the Hub's cache. The base is compared with the samples in
    the adapter's manifest unless `check_base` is False. The adapter of a quantised base (QLoRA) is
    merged into the model that was quantised. `check`="logits", or a batch, runs both models before
    the folder is committed; fused experts are then in memory. `overwrite` is that of `convert`.

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
    source, goal = open_place(adapter), open_place(dst)
    named_base = None if base is None else open_place(base)
    options = convert_options(
        goal,
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
        stored = find_adapters(source, adapters, stack)
        choice = choose_merge(stored, weights)
        base_place = find_base(stored, named_base)
        check_apart([source, base_place], options)
        folder = stack.enter_context(hold_open(base_place))
        base_file = stack.enter_context(closing(open_source(folder)))
        base_model = base_on_files(
            folder,
            base_place,
            stored.records,
            stored.settings,
            in_memory=check is not None,
        )
        base_is_stored = stored.has_base and base is None
        model, notes = attach_adapters(
            base_model.model,
            stored.checkpoint,
            stored.records,
            check_base=check_base and not base_is_stored,
            base_is_stored=base_is_stored,
        )
        max_mode = folder.mode_at(options.target)
        max_mode &= Place(stored.checkpoint.store).mode_at(options.target)
        arguments = {
            "made_from": (source.basename, base_place.basename),
            "check": None if check is None else live_logits(model, check).compare,
            "extra_files": _sidecar_files(base_file, stored),
            "max_mode": max_mode,
        }
        report = _save_merged(model, options, choice, arguments, begun)
    if base_model.unused:
        names = listing(list(base_model.unused), ", ")
        notes = (f"{names}: the base's model has no place for it, left out", *notes)
    return ConvertReport(
        options.path,
        options.format.name,
        report.bytes,
        report.tensors,
        report.seconds,
        report.casts,
        (),
        (*notes, *report.notes),
    )


def _save_merged(
    model: Any,
    options: ConvertOptions,
    choice: MergeChoice | None,
    arguments: Mapping[str, Any],
    begun: float,
) -> SaveReport:
    """Save by this process alone, even inside a process group."""
    settings = {
        "dtype": options.dtype or "as_is",
        "format": options.format.name,
        "max_shard_size": options.max_shard_bytes,
        "overwrite": options.overwrite,
    }
    config = make_config(None, settings)
    merge_step = None
    if choice is not None:
        merge_step = partial(merged_part, dtype=config.dtype, choice=choice)
    request = request_of(
        config,
        model,
        options.target,
        adapter_only=False,
        step=None,
        metrics={},
        tokenizer=None,
        merge=merge_step,
        **arguments,
    )
    ranks = Ranks(0, 1, channel="" if options.progress else "quiet")
    return run_save(Attempt(lambda: request), SaveContext(ranks, config, begun))


def _sidecar_files(base_file: TensorFile, stored: StoredAdapters) -> dict[str, bytes]:
    """Return the sidecar files of the base, with the adapter's tokenizer if it has one."""
    stores: dict[str, Store] = {}
    if isinstance(base_file, WeightsFolder):
        sidecars, _ = base_file.companions()
        for file in sidecars:
            if not _NOT_COPIED.match(file.name):
                stores[file.name] = base_file.store
    tokenizer_files = _tokenizer_files(stored.folder)
    if any("tokenizer" in name for name in tokenizer_files):
        stores = {name: store for name, store in stores.items() if not _TOKENIZER.search(name)}
        stores |= dict.fromkeys(tokenizer_files, stored.folder)
    contents: dict[str, bytes] = {}
    for name, store in stores.items():
        with closing(store.open(name)) as content:
            contents[name] = read_range(content, 0, content.size_bytes)
    return contents


def _tokenizer_files(store: Store) -> list[str]:
    names = [file.name for file in store.list_folder().objects if _TOKENIZER.search(file.name)]
    templates = store.within(_TEMPLATES).list_folder().objects
    return names + [f"{_TEMPLATES}/{file.name}" for file in templates]
