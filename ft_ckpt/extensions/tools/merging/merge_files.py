"""Merges stored adapters into their base, layer by layer.

The base model is created with mapped weight files. PEFT attaches the adapters to it, and then it is
saved like a live model with merged adapters.
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
# A tokenizer keeps its named chat templates in this folder.
_TEMPLATES = "additional_chat_templates"
# Files of the base that the merge rewrites, or that describe the base or its adapters only.
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
    """Merge an adapter into its base model, and write the result to the folder `dst`.

    The folder is complete and durable when the call returns. A failed call leaves nothing.

    `adapter` is a PEFT folder or a checkpoint of ft_ckpt, with one or several adapters. The active
    adapters are merged, or those named in `adapters`. If `weights` are given, each adapter is
    multiplied by its weight.

    `base` is the folder of the base model. By default it is the base in the same checkpoint, or
    else the one that the adapter names, which must be a folder on this machine or in the Hub's
    cache. The base is compared with the samples in the adapter's manifest unless `check_base` is
    False. The adapter of a quantised base (QLoRA) is merged into the model that was quantised.

    `check` is "logits" or a batch: both models then compute their output, and the outputs are
    compared before the folder is committed. This needs fused experts in memory. `overwrite` is that
    of `convert`.

    Layers are merged in float32 and rounded once to the dtype of the base, or to `dtype`. The base
    is mapped, and one layer at a time is in memory. The sidecar files are those of the base. The
    tokenizer is the adapter's if it has one. The manifest names the sources. The files of
    checkpoints of ft_ckpt are first compared with their digests.

    Raises SelectionError naming everything that cannot be merged. Raises LoadError if there is no
    base, if the adapters name several bases, if the config or the tensors of an adapter do not fit
    the base, or if the initialisation of an adapter changed the base in a way that cannot be
    repeated. Raises BaseMismatchError if the base is another one, and IncompleteError for NaN. For
    files it raises what `convert` raises.
    """
    begun = time.monotonic()
    source = open_place(adapter)
    target = open_place(dst)
    named_base = None if base is None else open_place(base)
    options = convert_options(
        target,
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
        base_is_stored = stored.has_base and named_base is None
        model, notes = attach_adapters(
            base_model.model,
            stored.checkpoint,
            stored.records,
            check_base=check_base and not base_is_stored,
            base_is_stored=base_is_stored,
        )
        max_mode = folder.mode_at(options.target)
        max_mode &= Place(stored.checkpoint.store).mode_at(options.target)
        compare_logits = None
        if check is not None:
            compare_logits = live_logits(model, check).compare
        arguments = {
            "made_from": (source.basename, base_place.basename),
            "check": compare_logits,
            "extra_files": _sidecar_files(base_file, stored),
            "max_mode": max_mode,
        }
        report = _save_merged(model, options, choice, arguments, begun)

    if base_model.unused_names:
        names = listing(list(base_model.unused_names), ", ")
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
    """Save the merged model. This process saves alone, even inside a process group."""
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
    """Return the contents of the sidecar files, by name.

    They are the base's files. If the adapter has a tokenizer, all tokenizer files are the
    adapter's.
    """
    stores: dict[str, Store] = {}
    if isinstance(base_file, WeightsFolder):
        sidecars, _ = base_file.sidecar_files()
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
    """Return the paths of the tokenizer files in a folder, named chat templates included."""
    names = [file.name for file in store.list_folder().objects if _TOKENIZER.search(file.name)]
    templates = store.within(_TEMPLATES).list_folder().objects
    return names + [f"{_TEMPLATES}/{file.name}" for file in templates]
