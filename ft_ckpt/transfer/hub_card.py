"""The model card of a repository on the Hub: its text is its authors', its metadata say what was pushed."""

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from huggingface_hub import RepoCard

from ft_ckpt.checkpoint.hub_names import is_hub_name
from ft_ckpt.checkpoint.manifest import Manifest, PartRecord

_BLANK = "---\n{{}}\n---\n\n# {name}\n\nThe weights of {what}.\n"
_DATASET = {"name": "evaluation data of the run", "type": "unknown"}
_EVALUATED = ("eval", "test", "val")
_NO_RESULTS = ("_runtime", "_per_second", "_time", "_steps", "_samples", "_epoch")
_TASKS = {  # by the end of a model's class, or the task type of an adapter
    **dict.fromkeys(("ForCausalLM", "LMHeadModel", "CAUSAL_LM"), "text-generation"),
    **dict.fromkeys(("ForSequenceClassification", "SEQ_CLS"), "text-classification"),
    **dict.fromkeys(("ForTokenClassification", "TOKEN_CLS"), "token-classification"),
    **dict.fromkeys(("ForQuestionAnswering", "QUESTION_ANS"), "question-answering"),
    "ForMaskedLM": "fill-mask",
    "ForImageClassification": "image-classification",
    "ForImageTextToText": "image-text-to-text",
    "ForSpeechSeq2Seq": "automatic-speech-recognition",
}


@dataclass(frozen=True)
class CardFacts:
    """What the metadata of a card should say."""

    name: str  # of the repository
    library: str | None
    base_id: str | None
    relation: str | None
    task: str | None
    tags: tuple[str, ...]
    metrics: Mapping[str, float]


def card_facts(name: str, manifest: Manifest, base_id: str | None, adapter_config: Mapping[str, Any]) -> CardFacts:
    """What is known of a checkpoint for the card of the repository `name`."""
    main = _main_part(manifest)
    kind = None if main is None else main.kind
    relation = "adapter" if kind == "adapter" else "merge" if len(manifest.made_from) > 1 else "finetune"
    tags = (f"base_model:{relation}:{base_id}",) if base_id else ()
    library = {"adapter": "peft", "model": "transformers"}.get(str(kind))
    metrics = {name: value for name, value in manifest.metrics.items() if _is_result(name, value, manifest)}
    task = _task_of(main, adapter_config)
    return CardFacts(name, library, base_id, relation if base_id else None, task, tags, metrics)


def blank_text(name: str, manifest: Manifest) -> str:
    """A short card, for a repository and a checkpoint that have none."""
    what = "a model" if manifest.step is None else f"a model after step {manifest.step:,}"
    return _BLANK.format(name=name, what=what)


def updated_card(text: str, facts: CardFacts) -> tuple[str, list[str]]:
    """The card with its metadata as they should be, byte for byte as it was if they are; and what to know of it."""
    try:
        card = RepoCard(text)
    except (ValueError, yaml.YAMLError) as error:
        return text, [f"README.md: its metadata cannot be read ({' '.join(str(error).split())}), so it stays as it is"]
    data: Any = card.data  # its methods are not typed
    before, notes = data.to_dict(), []
    for key, value in _fields_of(facts):
        data[key] = value
    tags = data.get("tags") or []
    tags = [tag for tag in ([tags] if isinstance(tags, str) else tags) if not _is_of_other_base(str(tag), facts)]
    data["tags"] = list(dict.fromkeys([*tags, *facts.tags])) or None
    if isinstance(data.get("base_model"), str) and not is_hub_name(data["base_model"]):
        data["base_model"] = None  # a path of this machine
    if facts.task is not None:
        data["pipeline_tag"] = data.get("pipeline_tag") or facts.task
    if facts.metrics and facts.task is None:
        notes.append("README.md: metrics are not in it, since the task of the model is not known")
    elif facts.metrics:
        found = _with_results(data.get("model-index"), facts)
        notes += [] if found else ["README.md: its model-index is not as the Hub has it, so metrics are not in it"]
        data["model-index"] = found or data.get("model-index")
    return (text if data.to_dict() == before else str(card)), notes


def _fields_of(facts: CardFacts) -> Iterator[tuple[str, str]]:
    found = {"library_name": facts.library, "base_model": facts.base_id, "base_model_relation": facts.relation}
    yield from ((key, value) for key, value in found.items() if value is not None)


def _is_of_other_base(tag: str, facts: CardFacts) -> bool:
    """Whether a tag names another base than the facts, or a path of this machine."""
    if not tag.startswith("base_model:") or tag in facts.tags:
        return False
    return facts.base_id is not None or not is_hub_name(tag.split(":")[-1])


def _with_results(index: Any, facts: CardFacts) -> list[Any] | None:
    """The model index with the results of this checkpoint in place of an older one's; None for one that is none."""
    index = copy.deepcopy(index) if index else [{"name": facts.name, "results": []}]
    try:
        results = [one for one in index[0]["results"] if one["dataset"].get("name") != _DATASET["name"]]
    except (AttributeError, IndexError, KeyError, TypeError):
        return None
    metrics = [{"type": _short_name(name), "name": name, "value": value} for name, value in facts.metrics.items()]
    index[0]["results"] = [*results, {"task": {"type": facts.task}, "dataset": dict(_DATASET), "metrics": metrics}]
    return list(index)


def _short_name(name: str) -> str:
    """The name of a metric without what it was measured on."""
    for start in _EVALUATED:
        for mark in "_/":
            name = name.removeprefix(f"{start}{mark}")
    return name


def _is_result(name: str, value: float, manifest: Manifest) -> bool:
    """Whether a number says how good the model is, not how it was trained or how long that took."""
    is_told = name in manifest.rankings or name.startswith(_EVALUATED)
    return is_told and math.isfinite(value) and not name.endswith(_NO_RESULTS)


def _main_part(manifest: Manifest) -> PartRecord | None:
    """The part that readers of the folder itself load."""
    parts = [part for part in manifest.parts if part.kind != "state"]
    return next((part for part in parts if part.path == ""), parts[0] if parts else None)


def _task_of(part: PartRecord | None, adapter_config: Mapping[str, Any]) -> str | None:
    told = [] if part is None else [part.class_name]
    told += [str(adapter_config.get("task_type"))]
    told += [str((adapter_config.get("auto_mapping") or {}).get("base_model_class"))]
    return next((task for end, task in _TASKS.items() for name in told if name.endswith(end)), None)
