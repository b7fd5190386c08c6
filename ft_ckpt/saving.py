"""One save, from the request to the commit: the road out, the same for every caller.

Three steps, each ended by an agreement of all ranks: choose and check (nothing moves), move and write, commit.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash
from torch import Tensor, nn

from ft_ckpt import commit, companions, engines, room
from ft_ckpt.catalog import digest_of, is_inside
from ft_ckpt.config import SaverConfig
from ft_ckpt.deliver import PartPlan, check_written, pieces, plan, second_names
from ft_ckpt.errors import ConfigError, IncompleteError, NoSpaceError, RankError, RanksDisagreeError
from ft_ckpt.gather import equal
from ft_ckpt.manifest import FileRecord
from ft_ckpt.modules import write_module
from ft_ckpt.objects import compress_file
from ft_ckpt.parts import Attribute, kind_of, parts_of
from ft_ckpt.progress import tracked
from ft_ckpt.ranks import Ranks, attempt
from ft_ckpt.records import base_record, manifest_of
from ft_ckpt.select import main_dtype
from ft_ckpt.training import DOCUMENT_NAME, State, state_part
from ft_ckpt.write import Writer, write_files

_COMPANION_BYTES = 16 << 20  # room for config and tokenizer files in the look at free space


@dataclass(frozen=True)
class SaveReport:
    """What a save committed, the same on every rank."""

    path: Path
    kind: str  # "full" | "adapter" | "attribute"
    bytes: int  # of all files
    tensors: int
    seconds: float  # from the call to the commit, synced
    casts: Mapping[str, int]  # "float32->bfloat16": number of tensors
    notes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Request:
    """One call of `save`, its defaults filled in."""

    model: nn.Module
    target: Path
    adapter_only: bool
    attribute: Attribute
    dtype: str
    chat_template_name: str | None
    tokenizer: Any
    format: str
    max_shard_bytes: int
    state_dict: Mapping[str, Tensor] | None
    state_dict_given: bool
    step: int | None
    metrics: Mapping[str, float]
    state: State | None = None  # of the run, to be resumed from the checkpoint
    found: Mapping[str, engines.Source] | None = None  # the sources the state was captured from
    run_id: str | None = None
    protect: tuple[Path, ...] = ()  # checkpoints not to be deleted for want of room
    extra_files: Mapping[str, str | bytes] = field(default_factory=dict)  # the caller's own, by path in the checkpoint


@dataclass(frozen=True, eq=False)
class _Prepared:
    """Everything known before the first tensor moves."""

    plans: tuple[PartPlan, ...]
    engine: str
    ties_to_check: tuple[tuple[engines.Source, engines.Source], ...]
    stage: Path | None  # on rank 0
    samples: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)  # part name -> fingerprint


def run(
    request: Request | None, error: BaseException | None, ranks: Ranks, config: SaverConfig, begun: float
) -> SaveReport:
    """Carry out `request`, or tell the other ranks of the `error` that there is instead. Collective.

    `begun` is when the call came, by `time.monotonic`. Raises what `CheckpointSaver.save` says.
    """
    tries, outcome = 0, _once(request, error, ranks, config, begun, 0)
    while "full" in outcome:  # the disk was filled by others meanwhile, and the saver was told not to give up
        tries += 1
        outcome = _once(request, None, ranks, config, begun, tries)
    return SaveReport(**{**outcome, "path": Path(outcome["path"]), "notes": tuple(outcome["notes"])})


def _once(
    request: Request | None, error: BaseException | None, ranks: Ranks, config: SaverConfig, begun: float, tries: int
) -> dict[str, Any]:
    """One try: what was committed, or {"full": why} on every rank."""
    prepared: _Prepared | None = None
    try:
        if request is not None:
            with ranks.working():
                prepared, error = attempt(lambda: _prepare(request, ranks, config, tries))
        # Everything that can be refused is refused here, before a tensor moves: later, ranks depend on each other.
        answers = ranks.agree("save()", _facts(request, prepared), error, same=("path", "kind", "step", "tensors"))
        if request is None or prepared is None:
            raise RankError("save(): agreed on without a plan on this rank; please report it")
        _refuse_lonely_dicts(answers)
        with ranks.working():
            report, error = attempt(lambda: _carry_out(request, prepared, answers, ranks, config, begun))
        if isinstance(error, NoSpaceError) and config.when_full != "raise":
            report, error = {"full": str(error)}, None
        return ranks.agree("the commit of save()", report, error)[0]
    finally:
        if prepared is not None and prepared.stage is not None:
            commit.discard(prepared.stage)


def _prepare(request: Request, ranks: Ranks, config: SaverConfig, tries: int) -> _Prepared:
    """Choose, lay out and check; on rank 0 also fill the stage with everything but weights."""
    found = dict(request.found or engines.sources(request.model))
    if request.state_dict_given:
        found = engines.from_state_dict(request.state_dict, found, ranks)
    own = {name: source for name, source in found.items() if ":" not in name}  # not of a run's further models
    parts = parts_of(
        request.model, own, adapter_only=request.adapter_only, attribute=request.attribute, dtype=request.dtype
    )
    if request.state is not None:
        parts.append(state_part(request.state, parts, own, frozen=not request.adapter_only))
    plans = tuple(plan(part, request.max_shard_bytes, request.format) for part in parts)
    doubtful = tuple(pair for part in parts for pair in part.doubtful)
    samples = {part.name: engines.sample(part.base, ranks.rank) for part in parts if part.base}
    stage = _fill_stage(request, plans, config, tries) if ranks.leads else None
    return _Prepared(plans, engines.engine_names(found), doubtful, stage, samples)


def _fill_stage(request: Request, plans: tuple[PartPlan, ...], config: SaverConfig, tries: int) -> Path:
    needed = sum(one.size_bytes for one in plans) + _COMPANION_BYTES
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
    except BaseException:
        commit.discard(stage)
        raise
    return stage


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
    elif part.kind == "state" and request.state is not None:
        (folder / DOCUMENT_NAME).write_text(json.dumps(request.state.document, separators=(",", ":")), encoding="utf-8")
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


def _facts(request: Request | None, prepared: _Prepared | None) -> dict[str, Any]:
    """What every rank must see alike, and what rank 0 wants to know of each."""
    if request is None or prepared is None:
        return {}
    names = repr([(f.path, f.layout.specs) for one in prepared.plans for f in one.files])
    return {
        "path": str(request.target),
        "kind": kind_of(request.adapter_only, request.attribute),
        "step": request.step,
        "tensors": xxhash.xxh3_64_hexdigest(names.encode()),
        "state_dict": request.state_dict_given,
        "samples": prepared.samples,
    }


def _refuse_lonely_dicts(answers: list[dict[str, Any]]) -> None:
    """Rank 0 writes: a state dict that others were handed and it was not leaves it waiting for tensors."""
    given = [str(rank) for rank, answer in enumerate(answers) if answer["state_dict"]]
    if given and not answers[0]["state_dict"]:
        raise RanksDisagreeError(
            f"state_dict= was given on rank(s) {', '.join(given)} and not on rank 0, which writes it; give it on rank 0"
        )


def _carry_out(
    request: Request,
    prepared: _Prepared,
    answers: list[dict[str, Any]],
    ranks: Ranks,
    config: SaverConfig,
    begun: float,
) -> dict[str, Any]:
    """Move and write the tensors, compare the files with the model, commit. Collective; the result is rank 0's."""
    if not ranks.leads and answers[0]["state_dict"]:
        return {}  # rank 0 was handed everything; a gather leaves the others with {} or None, which says nothing
    untied = [pair for pair in prepared.ties_to_check if not equal(*pair, ranks, config.bucket_bytes)]
    total = sum(one.size_bytes for one in prepared.plans)
    feed = tracked(pieces(prepared.plans, ranks, config.bucket_bytes, config.nonfinite), total, "saving", ranks.leads)
    if prepared.stage is None:
        for _ in feed:
            pass
        return {}
    try:
        _refuse_untied(untied)
        plans = [file for one in prepared.plans for file in one.files]
        with Writer(config.io_threads, config.direct_io) as writer:
            written = list(write_files(plans, feed, prepared.stage, writer))
        written += [link for one in prepared.plans for link in second_names(one, written, prepared.stage)]
    except Exception:
        for _ in feed:  # the other ranks are sending: take what they send, so that they come to the agreement
            pass
        raise
    for one in prepared.plans:
        check_written(one, prepared.stage)
    if config.compression is not None:
        written = [_compressed(file, prepared.stage, config.compression) for file in written]
    manifest = manifest_of(
        prepared.stage,
        prepared.plans,
        written,
        answers,
        compressed=config.compression is not None,
        kind=kind_of(request.adapter_only, request.attribute),
        step=request.step,
        metrics=request.metrics,
        world={"size": ranks.size, "engine": prepared.engine},
        run_id=request.run_id,
    )
    commit.commit(prepared.stage, request.target, manifest)
    return {
        "path": str(request.target),
        "kind": manifest.kind,
        "bytes": sum(file.size_bytes for file in manifest.files),
        "tensors": sum(len(part.tensors) for part in manifest.parts),
        "seconds": time.monotonic() - begun,
        "casts": _summed([part.casts for part in manifest.parts]),
        "notes": list(manifest.notes),
    }


def _compressed(file: FileRecord, stage: Path, compression: str) -> FileRecord:
    """The file's record once it is compressed in place: sizes are known only afterwards, so this is a second pass."""
    path = stage / file.path
    compress_file(path, compression)
    return FileRecord(file.path, path.stat().st_size, digest_of(path))


def _refuse_untied(pairs: list[tuple[engines.Source, engines.Source]]) -> None:
    if pairs:
        names = ", ".join(f"{one.name} and {other.name}" for one, other in pairs)
        raise IncompleteError(
            f"{names}: the model's config ties them, but their values differ; call model.tie_weights(), or set "
            "config.tie_word_embeddings=False to keep both"
        )


def _summed(counts: list[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for count in counts:
        for key, number in count.items():
            total[key] = total.get(key, 0) + number
    return total
