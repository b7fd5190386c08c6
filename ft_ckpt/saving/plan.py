"""Everything of a save that comes before the first tensor moves: choose, lay out, check, and fill the stage."""

import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ft_ckpt.checkpoint import commit, free_space
from ft_ckpt.checkpoint.manifest import BaseRecord
from ft_ckpt.config import SaverConfig
from ft_ckpt.distributed.inventory import added_state_of, engine_names, from_state_dict, sources
from ft_ckpt.distributed.ranks import Ranks
from ft_ckpt.distributed.samples import sample_elements
from ft_ckpt.distributed.tensor_info import Source
from ft_ckpt.errors import ConfigError, explained
from ft_ckpt.formats.registry import format_named
from ft_ckpt.model import pretrained_files as companions
from ft_ckpt.model.entries import EXTRA_FILE, main_dtype
from ft_ckpt.model.parts import Attribute, parts_of
from ft_ckpt.model.plain_module import write_module
from ft_ckpt.model.selection import without_own_layouts
from ft_ckpt.saving import replicas, reuse_frozen
from ft_ckpt.saving.build_manifest import base_record
from ft_ckpt.saving.files import PartPlan, plan_part
from ft_ckpt.saving.reuse_frozen import Offer
from ft_ckpt.storage.paths import is_inside
from ft_ckpt.training.capture import Captured
from ft_ckpt.training.items import model_sources
from ft_ckpt.training.state import DOCUMENT_NAME, state_part

_MEMORY, _PLENTY_BYTES = "/dev/shm", 1 << 30  # noqa: S108 - a folder of its own is made in it
_MANIFEST_BYTES = 16 << 20  # room for what is not known yet in the look at free space


@dataclass(frozen=True, eq=False)
class SaveRequest:
    """One call of `save`, its defaults filled in."""

    model: nn.Module
    target: Path
    dtype: str
    chat_template_name: str | None
    format: str
    max_shard_bytes: int
    tokenizer: Any
    adapter_only: bool
    step: int | None
    metrics: Mapping[str, float]
    base_id: str | None = None
    attribute: Attribute = None
    state_dict: Mapping[str, Tensor] | None = None
    state_dict_given: bool = False
    captured: Captured = field(default_factory=Captured)  # of the run, to be resumed from the checkpoint
    run_id: str | None = None
    protect: tuple[Path, ...] = ()  # checkpoints not to be deleted for want of room
    extra_files: Mapping[str, str | bytes] = field(default_factory=dict)  # the caller's own, by path in the checkpoint
    apart: replicas.Differences | None = None  # what ranks have come apart in; None: not looked at yet


def request_of(config: SaverConfig, model: nn.Module, target: Path, **given: Any) -> SaveRequest:
    """The request for `model`, with what `config` says where the call did not."""
    own: dict[str, Any] = {"dtype": config.dtype, "format": config.format, "base_id": config.base_id}
    own |= {"chat_template_name": config.chat_template_name, "max_shard_bytes": config.max_shard_bytes}
    return SaveRequest(model, target, **own, **given)


@dataclass(frozen=True, eq=False)
class Companions:
    """What a checkpoint says beside its tensors, on rank 0: taken at one moment, whatever becomes of the model."""

    files: Mapping[str, bytes] = field(default_factory=dict)  # by path in the checkpoint
    bases: Mapping[str, BaseRecord] = field(default_factory=dict)  # of adapters, by the names of their parts


@dataclass(frozen=True, eq=False)
class SavePlan:
    """Everything known before the first tensor moves."""

    plans: tuple[PartPlan, ...]
    engine: str
    ties_to_check: tuple[tuple[Source, Source], ...]
    stage: Path | None  # on rank 0
    samples: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)  # part name -> fingerprint
    companions: Companions = field(default_factory=Companions)
    offers: Mapping[str, Offer] = field(default_factory=dict)  # on rank 0: frozen files that may be there already


def prepare_stage(
    request: SaveRequest,
    ranks: Ranks,
    config: SaverConfig,
    tries: int,
    chosen: SavePlan | None,
    changed: frozenset[str],
) -> SavePlan:
    """Choose, lay out and check, if not `chosen` yet; on rank 0 also fill a stage with everything but weights.

    Frozen files of earlier checkpoints are in it, too, but for those that are known to have `changed`.
    """
    chosen = chosen or make_plan(request, ranks, config)
    if not ranks.leads:
        return chosen
    stage = commit.open_stage(request.target)
    try:
        offers = _find_offers(request, chosen.plans, ranks, config, stage, changed)
        total = sum(file.layout.size_bytes for one in chosen.plans for file in one.files if file.path not in offers)
        free_space.ensure_space(
            request.target,
            total + sum(map(len, chosen.companions.files.values())) + _MANIFEST_BYTES,
            config,
            step=request.step,
            run_id=request.run_id,
            protect=request.protect,
            tries=tries,
        )
        with explained(request.target):
            for path, content in chosen.companions.files.items():
                (stage / path).parent.mkdir(parents=True, exist_ok=True)
                (stage / path).write_bytes(content)
        return replace(chosen, stage=stage, offers=offers)
    except BaseException:
        commit.discard_stage(stage)
        raise


def make_plan(request: SaveRequest, ranks: Ranks, config: SaverConfig) -> SavePlan:
    """What is saved, and laid out how, from the live model as it is now; nothing is made yet."""
    captured = request.captured.with_tensors()
    own = model_sources(captured.found) or sources(request.model)
    mode = config.reuse_frozen if format_named(request.format).is_plain else "off"
    still = reuse_frozen.frozen_identities(own)  # before others take their place, so that all ranks plan the same files
    if request.state_dict_given:
        own = from_state_dict(request.state_dict, own, ranks)
    asked: dict[str, Any] = {"adapter_only": request.adapter_only, "attribute": request.attribute}
    parts = parts_of(request.model, own, **asked, dtype=request.dtype, extra=_non_tensor_state(request, own))
    parts = without_own_layouts(parts, captured.state is not None)
    if captured.state is not None:
        parts.append(state_part(captured.state, parts, own, frozen=not request.adapter_only))
    if ranks.size > 1 and not request.state_dict_given:
        replicas.refuse_experts(parts)
    if request.apart:
        parts = replicas.store_differences(parts, request.apart, ranks.rank)
        captured.document["apart"] = {name: dict(odd) for name, odd in request.apart.items()}
    plans = tuple(
        plan_part(part, request.max_shard_bytes, request.format, reuse_frozen.frozen_names(part, still, mode))
        for part in parts
    )
    doubtful = tuple(pair for part in parts for pair in part.doubtful)
    samples = {part.name: sample_elements(part.base, ranks.rank) for part in parts if part.base}
    engine = engine_names([*own.values(), *captured.found.values()])
    return SavePlan(plans, engine, doubtful, None, samples, companions_of(request, plans, ranks))


def _non_tensor_state(request: SaveRequest, own: Mapping[str, Source]) -> dict[str, Any]:
    """What the model's state dict lists that is no tensor. An adapter's run has it with its state."""
    if request.adapter_only and request.captured.state is not None:
        return {}
    found = added_state_of(request.model, own)
    return {name: one.value for name, one in found.items() if not isinstance(one.value, Tensor)}


def companions_of(request: SaveRequest, plans: Sequence[PartPlan], ranks: Ranks) -> Companions:
    """What the checkpoint will say beside its tensors, from the live objects as they are now; nothing but on rank 0.

    Raises CompanionError when tokenizer, config and model do not fit, ConfigError for extra files out of the folder.
    """
    if not ranks.leads:
        return Companions()
    extras = _encode_extra_files(request.extra_files)
    parts = [one.part for one in plans]
    for part in parts:
        if part.kind not in ("module", "state"):
            check_companions(part.module, request.tokenizer, request.chat_template_name)
    place = _scratch_folder()
    with explained(Path(place)), tempfile.TemporaryDirectory(prefix="ft_ckpt-", dir=place) as made:
        folder = Path(made)
        for one in plans:
            _write_companions(folder, one, request)
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    bases = {part.name: base_record(part, {}) for part in parts if part.kind == "adapter"}
    return Companions(files | extras, bases)


def _scratch_folder() -> str:
    """Where files are made that are read back at once: in memory where there is plenty, since training waits."""
    with suppress(OSError):
        if os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > _PLENTY_BYTES:
            return _MEMORY
    return tempfile.gettempdir()


def check_companions(module: nn.Module, tokenizer: Any, chat_template_name: str | None) -> None:
    """Raise CompanionError when the tokenizer or the generation settings do not fit `module`."""
    if hasattr(module, "config") and tokenizer is not None:
        companions.check_tokenizer(module, tokenizer)
    if hasattr(module, "generation_config"):
        companions.generation_config(module, tokenizer, chat_template_name)


def _find_offers(
    request: SaveRequest,
    plans: Sequence[PartPlan],
    ranks: Ranks,
    config: SaverConfig,
    stage: Path,
    changed: frozenset[str],
) -> dict[str, Offer]:
    if request.state_dict_given or config.nonfinite == "raise":  # which looks at all numbers
        return {}
    shares = [share for share in reuse_frozen.frozen_shares(plans, ranks.size) if share.file.path not in changed]
    return reuse_frozen.link_candidates(shares, request.target, stage, ranks, config.each_rank_writes != "on")


def _write_companions(root: Path, one: PartPlan, request: SaveRequest) -> None:
    part, folder = one.part, root / one.part.path
    folder.mkdir(parents=True, exist_ok=True)
    if part.kind == "model":
        generation = companions.generation_config(part.module, request.tokenizer, request.chat_template_name)
        companions.write_model(
            folder, part.module, dtype=main_dtype(part), tokenizer=request.tokenizer, generation=generation
        )
    elif part.kind == "adapter":
        base = base_record(part, {})
        companions.write_adapter(
            folder,
            part.module,
            str(part.adapter),
            base=base,
            beside=part.beside,
            base_id=request.base_id,
            tokenizer=request.tokenizer,
        )
    elif part.kind == "state":
        (folder / DOCUMENT_NAME).write_text(
            json.dumps(request.captured.document, separators=(",", ":")), encoding="utf-8"
        )
    else:
        write_module(folder, part.module, {entry.name: entry.shape for entry in part.entries})
    if part.extra is not None:
        (folder / EXTRA_FILE).write_text(part.extra, encoding="utf-8")
    if one.index is not None:
        (root / one.index_path).write_text(one.index, encoding="utf-8")


def _encode_extra_files(files: Mapping[str, str | bytes]) -> dict[str, bytes]:
    outside = [path for path in files if not is_inside(path)]
    if outside:
        raise ConfigError(f"extra_files: {', '.join(outside)}: expected plain paths inside the checkpoint")
    return {path: content.encode() if isinstance(content, str) else bytes(content) for path, content in files.items()}
