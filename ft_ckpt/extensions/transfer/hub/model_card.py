"""Updates the metadata of a model card for a checkpoint."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from huggingface_hub import RepoCard

from ft_ckpt.checkpoint.manifest import Manifest, PartRecord, is_hub_name

BLANK_CARD = "---\n{{}}\n---\n\n# {name}\n\nThe weights of {what}.\n"
_DATASET = {"name": "evaluation data of the run", "type": "unknown"}
_EVALUATED = ("eval", "test", "val")  # how the names of results of an evaluation begin
# How the names of measures that are no results end.
_NO_RESULTS = ("_runtime", "_per_second", "_time", "_steps", "_samples", "_epoch")
_LIBRARIES = {"adapter": "peft", "model": "transformers"}
# The task of the Hub, by the end of the name of a model's class, or by the task type of an adapter.
_TASKS = {
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
    """The metadata of a model card. `name` is that of the repository."""

    name: str
    library: str | None
    base_id: str | None
    relation: str | None
    task: str | None
    tags: tuple[str, ...]
    metrics: Mapping[str, float]


def card_facts(
    name: str, manifest: Manifest, base_id: str | None, adapter_config: Mapping[str, Any]
) -> CardFacts:
    """Return the metadata of a checkpoint for the card of the repository `name`."""
    parts = [part for part in manifest.parts if part.kind != "state"]
    main_part = _main_part(parts)
    kind = None if main_part is None else main_part.kind
    relation = _relation(kind, manifest)
    library = _LIBRARIES.get(str(kind))
    if main_part is not None and main_part.is_of_diffusers:
        library = "diffusers"
    metrics: dict[str, float] = {}
    for metric, value in manifest.metrics.items():
        if _is_result(metric, value, manifest):
            metrics[metric] = value

    return CardFacts(
        name=name,
        library=library,
        base_id=base_id,
        relation=relation if base_id else None,
        task=_task_of(main_part, adapter_config),
        tags=(f"base_model:{relation}:{base_id}",) if base_id else (),
        metrics=metrics,
    )


def _main_part(parts: Sequence[PartRecord]) -> PartRecord | None:
    """Return the model or adapter at the root of the checkpoint, or else the first one."""
    for part in parts:
        if part.path == "":
            return part
    return parts[0] if parts else None


def _relation(kind: str | None, manifest: Manifest) -> str:
    if kind == "adapter":
        return "adapter"
    return "merge" if len(manifest.made_from) > 1 else "finetune"


def updated_card(text: str, facts: CardFacts) -> tuple[str, list[str]]:
    """Update the metadata of a card.

    Returns the text of the card, and notes for the report. The text stays byte for byte the same if
    nothing changes.
    """
    try:
        card = RepoCard(text)
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        note = f"README.md: its metadata cannot be read ({reason}), so it stays as it is"
        return text, [note]

    data: Any = card.data  # its methods are not typed
    before = data.to_dict()
    fields = {
        "library_name": facts.library,
        "base_model": facts.base_id,
        "base_model_relation": facts.relation,
    }
    for key, value in fields.items():
        if value is not None:
            data[key] = value

    data["tags"] = _updated_tags(data.get("tags"), facts)
    if isinstance(data.get("base_model"), str) and not is_hub_name(data["base_model"]):
        data["base_model"] = None  # a local path
    if facts.task is not None and not data.get("pipeline_tag"):
        data["pipeline_tag"] = facts.task
    notes = _add_results(data, facts)
    if data.to_dict() != before:
        text = str(card)
    return text, notes


def _updated_tags(tags: Any, facts: CardFacts) -> list[Any] | None:
    """Add the checkpoint's tags to those of the card, and remove tags of another base.

    Returns None if there are no tags.
    """
    if not isinstance(tags, list):
        tags = [tags] if tags else []
    kept_tags = [tag for tag in tags if not _is_of_other_base(str(tag), facts)]
    new_tags = [tag for tag in facts.tags if tag not in kept_tags]
    return [*kept_tags, *new_tags] or None


def _add_results(data: Any, facts: CardFacts) -> list[str]:
    """Add the metrics to the card. Returns a note if they cannot be added."""
    if not facts.metrics:
        return []
    if facts.task is None:
        return ["README.md: metrics are not in it, since the task of the model is not known"]
    index = _with_results(data.get("model-index"), facts)
    if index is None:
        return ["README.md: its model-index is not as the Hub has it, so metrics are not in it"]
    data["model-index"] = index
    return []


def _is_of_other_base(tag: str, facts: CardFacts) -> bool:
    """Check whether a tag names another base, or a local path."""
    if not tag.startswith("base_model:") or tag in facts.tags:
        return False
    return facts.base_id is not None or not is_hub_name(tag.split(":")[-1])


def _with_results(index: Any, facts: CardFacts) -> list[Any] | None:
    """Return the model index with the results of this checkpoint instead of an older one.

    Returns None if the index is malformed.
    """
    index = copy.deepcopy(index) if index else [{"name": facts.name, "results": []}]
    try:
        results = [result for result in index[0]["results"] if not _is_of_run(result)]
    except (AttributeError, IndexError, KeyError, TypeError):
        return None
    metrics = []
    for name, value in facts.metrics.items():
        metrics.append({"type": _short_name(name), "name": name, "value": value})
    task = {"type": facts.task}
    results.append({"task": task, "dataset": dict(_DATASET), "metrics": metrics})
    index[0]["results"] = results
    return list(index)


def _is_of_run(result: Any) -> bool:
    return bool(result["dataset"].get("name") == _DATASET["name"])


def _short_name(name: str) -> str:
    """Return the name of a metric without the prefix of its data set, such as "eval_"."""
    for prefix in _EVALUATED:
        for separator in "_/":
            name = name.removeprefix(f"{prefix}{separator}")
    return name


def _is_result(name: str, value: float, manifest: Manifest) -> bool:
    """Check whether a metric is a finite result of an evaluation.

    Measures of the training or of its speed do not count.
    """
    is_metric = name in manifest.rankings or name.startswith(_EVALUATED)
    return is_metric and math.isfinite(value) and not name.endswith(_NO_RESULTS)


def _task_of(part: PartRecord | None, adapter_config: Mapping[str, Any]) -> str | None:
    """Return the task of the model, or None if it is not known."""
    auto_mapping = adapter_config.get("auto_mapping") or {}
    names = [str(adapter_config.get("task_type")), str(auto_mapping.get("base_model_class"))]
    if part is not None:
        names.append(part.class_name)
    for ending, task in _TASKS.items():
        if any(name.endswith(ending) for name in names):
            return task
    return None
