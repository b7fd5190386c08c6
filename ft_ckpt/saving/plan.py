"""The plan of a save: request, parts, files, sidecar files, manifest."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import cache, partial
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor, nn

from ft_ckpt._version import __version__
from ft_ckpt.checkpoint.manifest import DIFFUSERS_LORA_FILE, MANIFEST_NAME, BaseRecord, Manifest, PartRecord
from ft_ckpt.config import SaverConfig
from ft_ckpt.distributed.ranks import Ranks
from ft_ckpt.distributed.replicas import sample_elements
from ft_ckpt.distributed.sharding import is_known_to_all
from ft_ckpt.distributed.source import Source
from ft_ckpt.distributed.tensors import ModelTensors, engine_names, from_state_dict
from ft_ckpt.distributed.wrappers import unwrap, user_class
from ft_ckpt.errors import ConfigError, IncompleteError
from ft_ckpt.formats.registry import format_named
from ft_ckpt.model import companions as companions
from ft_ckpt.model.base_model import identifying_tensors, record_of_base, refuse_merged
from ft_ckpt.model.config_check import check_config
from ft_ckpt.model.diffusers import is_diffusers, write_config
from ft_ckpt.model.entries import MergeChoice, Part, lossy_casts, main_dtype, shared_between
from ft_ckpt.model.parts import Attribute, parts_of
from ft_ckpt.model.selection import without_own_layouts
from ft_ckpt.model.settings import EXTRA_FILE, SETTINGS_FILES
from ft_ckpt.saving import replicas
from ft_ckpt.saving.files import PartPlan, frozen_names, plan_part
from ft_ckpt.storage.digests import FileRecord
from ft_ckpt.storage.place import Place
from ft_ckpt.storage.scratch import files_made_by
from ft_ckpt.storage.store import Store, is_inside
from ft_ckpt.training.items import model_sources
from ft_ckpt.training.state import DOCUMENT_NAME, FOLDER, Captured, Document, state_part

BaseSamples = Mapping[str, Mapping[str, Mapping[str, float]]]  # part -> tensor -> flat index -> element
_LIBRARIES = ("torch", "transformers", "peft", "accelerate", "safetensors")


def manifest_of(
    plans: Sequence[PartPlan],
    files: Iterable[FileRecord],
    samples: Sequence[BaseSamples],
    *,
    compressed: bool,
    bases: Mapping[str, BaseRecord],
    classes: Mapping[str, str],
    notes: Sequence[str],
    **facts: Any,
) -> Manifest:
    """The manifest of these plans and `files`.

    `samples`: sampled elements of the adapters' bases, from each rank. `bases` and `classes`: base records and class
    names by the name of the part. `notes` are added to those of the parts; `facts` are further fields of the manifest.
    """
    parts = [one.part for one in plans]
    return Manifest(
        parts=tuple(
            _part_record(one, _base_with_fingerprint(name, bases, samples), classes[name], compressed)
            for one in plans
            for name in [one.part.name]
        ),
        files=tuple(files),
        created=datetime.now(timezone.utc).isoformat(),
        versions=library_versions(),
        shared=shared_between(parts),
        notes=tuple(dict.fromkeys([*(note for part in parts for note in part.notes), *notes])),
        **facts,
    )


def _part_record(one: PartPlan, base: BaseRecord | None, class_name: str, compressed: bool) -> PartRecord:
    part = one.part
    tensors = (record for file in one.files for record in file.records())
    trainable = tuple(e.name for e in part.entries if e.source is not None and e.source.trainable)
    return PartRecord(
        name=part.name,
        path=part.path,
        kind=part.kind,
        format=one.format,
        class_name=class_name,
        tensors=tuple(replace(record, start=0, end=0) if compressed else record for record in tensors),
        ties=part.ties,
        trainable=trainable,
        adapter=part.adapter,
        active=part.active,
        base=base,
        casts=lossy_casts(part),
    )


def _base_with_fingerprint(
    name: str, bases: Mapping[str, BaseRecord], samples: Sequence[BaseSamples]
) -> BaseRecord | None:
    """The base of an adapter with its fingerprint, merged from the samples of all ranks; None for other parts."""
    if name not in bases:
        return None
    merged: dict[str, dict[str, float]] = {}
    for own in samples:
        for tensor, values in own.get(name, {}).items():
            merged.setdefault(tensor, {}).update(values)
    return replace(bases[name], fingerprint=merged)


@cache  # reading a package's metadata takes milliseconds
def library_versions() -> dict[str, str]:
    """The versions of ft_ckpt and of the libraries that affect the saved files."""
    return {"ft_ckpt": __version__, **{name: metadata.version(name) for name in _LIBRARIES}}


_ROWS, _LENGTH, _SEED = 2, 16, 0  # of the batch for check="logits"
# Bound on the relative difference of outputs (Euclidean norms): merged weights are rounded once to
# their type; the live model rounds the product of the base and that of the adapter separately.
_BOUNDS = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True, eq=False)
class LogitsCheck:
    """The output of the live model for a batch. All ranks compute it; rank 0 compares it."""

    batch: Mapping[str, Any]
    logits: Tensor  # on the host, in float32
    kind: type  # the class to load with
    dtype: torch.dtype  # of the live model's computation

    def compare(self, folder: Path) -> str:
        """Load `folder` with transformers and compare; return a note with the relative difference.

        Raises IncompleteError when the difference exceeds the bound of its type.
        """
        cls: Any = self.kind
        loaded = cls.from_pretrained(folder, dtype="auto", local_files_only=True).eval()
        found = _logits_of(loaded, self.batch)
        bound = max(_BOUNDS.get(self.dtype, 1e-1), _BOUNDS.get(loaded.dtype, 1e-1))
        off = float((found - self.logits).norm() / self.logits.norm().clamp_min(1e-30))
        note = (
            f"logits of {found.shape[0]} x {found.shape[1]} tokens differ by {off:.2g} of their size, bound {bound:g}"
        )
        if not off <= bound:
            raise IncompleteError(f"{note}: the merged model is not the live one; nothing is committed")
        return note


def live_logits(model: nn.Module, check: str | Mapping[str, Any]) -> LogitsCheck:
    """The current output of `model` for the batch `check`, or for random token ids if it is "logits".

    Call on every rank. The model is in eval mode meanwhile. Raises ConfigError for another `check`, and for "logits"
    if the model does not take token ids.
    """
    inside: Any = unwrap(model)
    base = inside.get_base_model() if hasattr(inside, "get_base_model") else inside
    batch = _made_batch(base) if check == "logits" else check
    if not isinstance(batch, Mapping):
        raise ConfigError(f'check={check!r}: expected "logits", or a batch as a mapping, such as a tokenizer gives')
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    held = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
    with _in_eval_mode(model):
        logits = _logits_of(model, held)
    host = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in held.items()}
    return LogitsCheck(host, logits, user_class(type(base)), base.dtype)


@torch.no_grad()
def _logits_of(model: Any, batch: Mapping[str, Any]) -> Tensor:
    found = model(**batch)
    logits: Tensor = found["logits"] if "logits" in found else found[0]
    return logits.detach().float().cpu()


def _made_batch(model: Any) -> dict[str, Tensor]:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    words = getattr(text, "vocab_size", None)
    if not isinstance(words, int) or getattr(model, "main_input_name", "") != "input_ids":
        raise ConfigError(f'check="logits": no batch can be made for {type(model).__name__}; give one, check={{...}}')
    ids = torch.randint(words, (_ROWS, _LENGTH), generator=torch.Generator("cpu").manual_seed(_SEED), device="cpu")
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return {**batch, "decoder_input_ids": ids} if getattr(config, "is_encoder_decoder", False) else batch


@contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@dataclass(frozen=True, eq=False)
class SaveRequest:
    """The arguments of one save, with defaults filled in."""

    model: nn.Module
    target: Place
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
    captured: Captured | None = None  # the tensors and, for a run, its state; None: captured by `plan_save`
    run_id: str | None = None
    protect: tuple[Place, ...] = ()  # checkpoints that are not deleted to make room
    extra_files: Mapping[str, str | bytes] = field(default_factory=dict)  # from the caller, by path in the checkpoint
    differing: replicas.Differences | None = None  # replicas that differ between ranks; None: not compared yet
    made_from: tuple[str, ...] = ()  # names of the checkpoints that the weights were computed from
    max_mode: int = 0o777  # see LocalStore; less where the checkpoint is made of other files
    merged: MergeChoice | None = None  # the adapters that are merged into the base
    check: LogitsCheck | None = None  # compared with the output of the written folder before the commit
    collect: Callable[[Store], tuple[list[FileRecord], list[str]]] | None = None  # collects the writers' files in it
    notes: tuple[str, ...] = ()  # further ones for the report and the manifest
    check_lease: Callable[[], None] | None = None  # raises if another process has taken the run's directory over


def request_of(config: SaverConfig, model: nn.Module, target: Place, **given: Any) -> SaveRequest:
    """The request for `model`, with defaults from `config`."""
    own: dict[str, Any] = {"dtype": config.dtype, "format": config.format, "base_id": config.base_id}
    own |= {"chat_template_name": config.chat_template_name, "max_shard_bytes": config.max_shard_bytes}
    return SaveRequest(model, target, **own, **given)


@dataclass(frozen=True, eq=False)
class Companions:
    """The sidecar files of a checkpoint, on rank 0: taken at one moment, independent of later changes to the model."""

    files: Mapping[str, bytes] = field(default_factory=dict)  # by path in the checkpoint
    bases: Mapping[str, BaseRecord] = field(default_factory=dict)  # of adapters, by part name
    classes: Mapping[str, str] = field(default_factory=dict)  # class names of the modules, by part name
    document: Document = field(default_factory=dict)  # the state of a run
    notes: tuple[str, ...] = ()  # on the tokenizer

    def contents(self) -> dict[str, bytes]:
        """All files by path; the document is encoded here, because planning still changes it."""
        text = json.dumps(self.document, separators=(",", ":")).encode()
        return {**self.files, **({f"{FOLDER}/{DOCUMENT_NAME}": text} if self.document else {})}


def companions_of(request: SaveRequest, plans: Sequence[PartPlan], document: Document, ranks: Ranks) -> Companions:
    """The sidecar files of the live objects as they are now; empty on ranks other than 0.

    `document` is the state of a run. Raises CompanionError when tokenizer, config and model do not fit, ConfigError for
    extra files outside the folder.
    """
    if not ranks.is_main:
        return Companions()
    own = {path for one in plans for path in (one.index_path, *(file.path for file in one.files))}
    extras = _encode_extra_files(request.extra_files, own | {MANIFEST_NAME, f"{FOLDER}/{DOCUMENT_NAME}"})
    described = [one.part for one in plans if one.part.kind in ("model", "adapter")]
    notes: list[str] = []
    for part in described:
        notes += check_companions(part.module, request.tokenizer, request.chat_template_name)
    parts = [one.part for one in plans if one.part.kind != "state"]
    bases = {part.name: record_of_base(part) for part in parts if part.kind == "adapter"}
    files: dict[str, bytes] = {}
    for part in parts:
        made = files_made_by(partial(_write_companions, part=part, request=request, base=bases.get(part.name)))
        files |= {_path_in(part, name): content for name, content in made.items()}
    if request.tokenizer is not None and described:
        made = files_made_by(lambda folder: companions.write_tokenizer(folder, request.tokenizer))
        files |= {_path_in(part, name): content for part in described for name, content in made.items()}
        notes += companions.notes_on_classes(request.tokenizer)
    texts = {_path_in(one.part, EXTRA_FILE): one.part.extra for one in plans}
    texts |= {one.index_path: one.index for one in plans}
    files |= {path: text.encode() for path, text in texts.items() if text is not None}
    modules = {one.part.name: one.part.module for one in plans}
    return Companions(
        {**files, **extras},
        bases,
        {name: "" if module is None else user_class(type(module)).__name__ for name, module in modules.items()},
        document,
        tuple(notes),
    )


def check_companions(module: nn.Module, tokenizer: Any, chat_template_name: str | None) -> tuple[str, ...]:
    """Notes on a tokenizer that does not fit the module in all.

    Raises CompanionError when the tokenizer, or generation settings made from it, do not fit.
    """
    if chat_template_name is not None:
        companions.generation_config(module, tokenizer, chat_template_name)
    has_tokens = hasattr(module, "config") and tokenizer is not None
    return companions.check_tokenizer(module, tokenizer) if has_tokens else ()


def _write_companions(folder: Path, part: Part, request: SaveRequest, base: BaseRecord | None) -> None:
    if part.kind == "model" and is_diffusers(part.module):
        write_config(folder, part)
    elif part.kind == "model":
        generation = companions.generation_config(part.module, request.tokenizer, request.chat_template_name)
        companions.write_model(folder, part.module, dtype=main_dtype(part), generation=generation)
    elif base is not None:
        how: dict[str, Any] = {"base": base, "beside": part.beside, "base_id": request.base_id}
        how["library"] = "diffusers" if part.file == DIFFUSERS_LORA_FILE else "peft"
        companions.write_adapter(folder, part.module, str(part.adapter), **how)


def _path_in(part: Part, name: str) -> str:
    return PurePosixPath(part.path, name).as_posix()


def _encode_extra_files(files: Mapping[str, str | bytes], own: set[str]) -> dict[str, bytes]:
    """The contents of the caller's files. Raises ConfigError for names in `own`, which are the checkpoint's."""
    outside = [f"{path}" if isinstance(path, str) else repr(path) for path in files if not is_inside(path)]
    if outside:
        raise ConfigError(f"extra_files: {', '.join(outside)}: expected plain paths inside the checkpoint")
    if taken := sorted(own & files.keys()):
        raise ConfigError(f"extra_files: {', '.join(taken)}: a file of the checkpoint itself; choose another name")
    if wrong := [
        path for path, content in files.items() if not isinstance(content, str | bytes | bytearray | memoryview)
    ]:
        raise ConfigError(f"extra_files: {', '.join(wrong)}: expected text or bytes")
    return {path: content.encode() if isinstance(content, str) else bytes(content) for path, content in files.items()}


@dataclass(frozen=True, eq=False)
class SavePlan:
    """The parts of a checkpoint with their weight files, and the sidecar files."""

    plans: tuple[PartPlan, ...]
    engine: str
    ties_to_check: tuple[tuple[Source, Source], ...]
    is_spread: bool = True  # whether every rank can gather a file; else rank 0 alone can
    samples: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)  # part -> tensor -> element
    companions: Companions = field(default_factory=Companions)


def _sources_of(parts: Iterable[Part]) -> Iterator[Source]:
    return (source for part in parts for entry in part.entries for source in entry.sources)


def plan_save(request: SaveRequest, ranks: Ranks, config: SaverConfig) -> SavePlan:
    """The plan for the live model as it is now. Nothing is moved or written.

    Raises SelectionError or a subclass when the model lacks what was requested, IncompleteError for tensors that the
    files would lack, CompanionError when tokenizer, config and model do not fit.
    """
    captured = request.captured or Captured(ModelTensors(request.model))
    if captured.error is not None:
        raise captured.error
    own = model_sources(captured.found) or captured.tensors.sources()
    links = format_named(request.format).is_plain and request.merged is None  # an export shares no files
    mode = config.reuse_frozen if links else "off"
    # Taken before a state dict replaces the tensors, so that all ranks plan the same files.
    frozen = frozenset(source.key for source in own.values() if not source.trainable and source.is_parameter)
    if request.state_dict is not None:
        own = from_state_dict(request.state_dict, own, ranks)
    extra: dict[str, Any] = {}  # entries of the model's state dict that are not tensors
    if not request.adapter_only or captured.state is None:  # a run of an adapter has them in its state
        added = captured.tensors.added()
        extra = {name: one.value for name, one in added.items() if not isinstance(one.value, Tensor)}
    parts = parts_of(
        request.model,
        own,
        adapter_only=request.adapter_only,
        attribute=request.attribute,
        merged=request.merged,
        dtype=request.dtype,
        extra=extra,
    )
    parts = without_own_layouts(parts, captured.state is not None)
    if captured.state is not None:
        parts.append(state_part(captured.state, parts, own))
    if request.differing:
        parts = replicas.take_first_values(parts, request.differing)
        captured.document["differing"] = sorted(request.differing)
    for module in {id(part.module): part.module for part in parts if part.kind == "adapter"}.values():
        refuse_merged(module)
    plans = tuple(
        plan_part(part, request.max_shard_bytes, request.format, frozen_names(part, frozen, mode)) for part in parts
    )
    return SavePlan(
        plans,
        engine=engine_names([*own.values(), *captured.found.values()]),
        ties_to_check=tuple(pair for part in parts for pair in part.doubtful),
        is_spread=all(is_known_to_all(source.sharding, ranks.size) for source in _sources_of(parts)),
        samples={part.name: sample_elements(identifying_tensors(part), ranks.rank) for part in parts if part.base},
        companions=companions_of(request, plans, captured.document, ranks),
    )


def check_configs(plan: SavePlan, request: SaveRequest) -> tuple[str, ...]:
    """Notes on the tokenizer, and on transformers models of the plan that `from_pretrained` would not load; on rank 0.

    Raises CompanionError for one that its config does not describe.
    """
    is_run = request.captured is not None and request.captured.state is not None
    notes = [*plan.companions.notes]
    for part in (one.part for one in plan.plans if one.part.tensors):
        config = plan.companions.files[_path_in(part, SETTINGS_FILES["model"])]
        notes += check_config(part, config.decode(), is_run=is_run)
    return tuple(notes)
