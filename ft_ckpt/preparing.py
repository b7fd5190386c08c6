"""Everything of a save that comes before the first tensor moves: choose, lay out, check, and fill the stage."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ft_ckpt import commit, companions, engines, replicas, reuse, room
from ft_ckpt.capturing import Captured
from ft_ckpt.catalog import is_inside
from ft_ckpt.config import SaverConfig
from ft_ckpt.deliver import PartPlan, plan
from ft_ckpt.errors import ConfigError
from ft_ckpt.modules import write_module
from ft_ckpt.parts import Attribute, parts_of
from ft_ckpt.ranks import Ranks
from ft_ckpt.records import base_record
from ft_ckpt.reuse import Memory, Reuse
from ft_ckpt.select import main_dtype
from ft_ckpt.training import DOCUMENT_NAME, state_part

_COMPANION_BYTES = 16 << 20  # room for config and tokenizer files in the look at free space


@dataclass(frozen=True, eq=False)
class Request:
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
    attribute: Attribute = None
    state_dict: Mapping[str, Tensor] | None = None
    state_dict_given: bool = False
    captured: Captured = field(default_factory=Captured)  # of the run, to be resumed from the checkpoint
    run_id: str | None = None
    protect: tuple[Path, ...] = ()  # checkpoints not to be deleted for want of room
    extra_files: Mapping[str, str | bytes] = field(default_factory=dict)  # the caller's own, by path in the checkpoint
    memory: Memory | None = None  # of the checkpoints before
    apart: replicas.Apart | None = None  # what ranks have come apart in; None: not looked at yet


def request_of(config: SaverConfig, model: nn.Module, target: Path, **given: Any) -> Request:
    """The request for `model`, with what `config` says where the call did not."""
    return Request(
        model, target, config.dtype, config.chat_template_name, config.format, config.max_shard_bytes, **given
    )


@dataclass(frozen=True, eq=False)
class Prepared:
    """Everything known before the first tensor moves."""

    plans: tuple[PartPlan, ...]
    engine: str
    ties_to_check: tuple[tuple[engines.Source, engines.Source], ...]
    stage: Path | None  # on rank 0
    samples: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)  # part name -> fingerprint
    reuse: Reuse = field(default_factory=Reuse)


def prepare(
    request: Request, ranks: Ranks, config: SaverConfig, tries: int, chosen: Prepared | None = None
) -> Prepared:
    """Choose, lay out and check, if not `chosen` yet; on rank 0 also fill the stage with everything but weights."""
    chosen = chosen or choose(request, ranks, config)
    if not ranks.leads:
        return chosen
    stage, same = _fill_stage(request, chosen.plans, config, tries, chosen.reuse)
    return replace(chosen, stage=stage, reuse=same)


def choose(request: Request, ranks: Ranks, config: SaverConfig) -> Prepared:
    """What is saved, and laid out how, from the live model as it is now; nothing is made yet."""
    captured = request.captured.with_tensors()
    found = dict(captured.found or engines.sources(request.model))
    mode = config.reuse_frozen if request.format == "safetensors" else "off"
    still = reuse.frozen(found)  # before others take their place, so that all ranks plan the same files
    if request.state_dict_given:
        found = engines.from_state_dict(request.state_dict, found, ranks)
    own = {name: source for name, source in found.items() if ":" not in name}  # not of a run's further models
    parts = parts_of(
        request.model, own, adapter_only=request.adapter_only, attribute=request.attribute, dtype=request.dtype
    )
    if captured.state is not None:
        parts.append(state_part(captured.state, parts, own, frozen=not request.adapter_only))
    if ranks.size > 1 and not request.state_dict_given:
        replicas.refuse_experts(parts)
    if request.apart:
        parts = replicas.set_apart(parts, request.apart, ranks.rank)
        captured.document["apart"] = {name: list(odd) for name, odd in request.apart.items()}
    plans = tuple(plan(part, request.max_shard_bytes, request.format, reuse.apart(part, still, mode)) for part in parts)
    doubtful = tuple(pair for part in parts for pair in part.doubtful)
    samples = {part.name: engines.sample(part.base, ranks.rank) for part in parts if part.base}
    same = reuse.choose(None if request.state_dict_given else request.memory, plans, request.target)
    return Prepared(plans, engines.engine_names(found), doubtful, None, samples, same)


def _fill_stage(
    request: Request, plans: tuple[PartPlan, ...], config: SaverConfig, tries: int, same: Reuse
) -> tuple[Path, Reuse]:
    needed = sum(one.size_bytes for one in plans) - reuse.saved_bytes(request.memory, same) + _COMPANION_BYTES
    room.ensure(
        request.target,
        needed,
        config,
        step=request.step,
        run_id=request.run_id,
        protect=request.protect,
        tries=tries,
    )
    for one in plans:
        if one.part.kind not in ("module", "state"):
            check_companions(one.part.module, request.tokenizer, request.chat_template_name)
    stage = commit.open_stage(request.target)
    try:
        for one in plans:
            _write_companions(stage, one, request)
        _write_extras(stage, request.extra_files)
        return stage, reuse.bring(request.memory, same, stage)
    except BaseException:
        commit.discard(stage)
        raise


def check_companions(module: nn.Module, tokenizer: Any, chat_template_name: str | None) -> None:
    """Raise CompanionError when the tokenizer or the generation settings do not fit `module`."""
    if hasattr(module, "config") and tokenizer is not None:
        companions.check_tokenizer(module, tokenizer)
    if hasattr(module, "generation_config"):
        companions.generation_config(module, tokenizer, chat_template_name)


def _write_companions(stage: Path, one: PartPlan, request: Request) -> None:
    part, folder = one.part, stage / one.part.path
    folder.mkdir(parents=True, exist_ok=True)
    if part.kind == "model":
        generation = companions.generation_config(part.module, request.tokenizer, request.chat_template_name)
        companions.write_model(
            folder, part.module, dtype=main_dtype(part), tokenizer=request.tokenizer, generation=generation
        )
    elif part.kind == "adapter":
        base = base_record(part, {})
        companions.write_adapter(folder, part.module, str(part.adapter), base=base, tokenizer=request.tokenizer)
    elif part.kind == "state":
        (folder / DOCUMENT_NAME).write_text(
            json.dumps(request.captured.document, separators=(",", ":")), encoding="utf-8"
        )
    else:
        write_module(folder, part.module, {entry.name: entry.shape for entry in part.entries})
    if one.index is not None:
        (stage / one.index_path).write_text(one.index, encoding="utf-8")


def _write_extras(stage: Path, files: Mapping[str, str | bytes]) -> None:
    outside = [path for path in files if not is_inside(path)]
    if outside:
        raise ConfigError(f"extra_files: {', '.join(outside)}: expected plain paths inside the checkpoint")
    for path, content in files.items():
        (stage / path).parent.mkdir(parents=True, exist_ok=True)
        (stage / path).write_bytes(content.encode() if isinstance(content, str) else content)
