"""Writes the first lines of the page, the problems, and the section that describes the run."""

from collections.abc import Iterable

from ft_ckpt.cli.plan import human_time
from ft_ckpt.cli.report.charts import escaped
from ft_ckpt.cli.report.facts import KeptCheckpoint, RunFacts, StoredModel
from ft_ckpt.cli.report.texts import count_text, moment_text, value_text
from ft_ckpt.values import human_size

# the setting with the number of parameters of an adapter's model, with its base
_PARAMETERS_WITH_BASE = "parameters"


def lead_text(facts: RunFacts) -> str:
    """Return sentences about the number of checkpoints, their size, the newest and the best."""
    sentences = [f"{count_text(len(facts.checkpoints), 'checkpoint')}, {_size_text(facts)}."]
    if facts.saves:
        saves = count_text(len(facts.saves), "logged save")
        deleted = len(facts.dropped_saves)
        verb = "was" if deleted == 1 else "were"
        sentences.append(f"Of {saves}, {deleted or 'none'} {verb} deleted since.")
    newest = _newest_checkpoint(facts)
    sentences.append(f"Newest: {newest.name}, {moment_text(newest.created)} UTC.")
    for metric in facts.rankings:
        best = facts.best_checkpoint(metric)
        if best is not None:
            sentences.append(f"Best {metric}: {value_text(best.metrics[metric])}, {best.name}.")
    return " ".join(sentences)


def _size_text(facts: RunFacts) -> str:
    size = human_size(facts.disk_bytes)
    shared_bytes = sum(checkpoint.size_bytes for checkpoint in facts.checkpoints) - facts.disk_bytes
    return f"{size}, {human_size(shared_bytes)} shared" if shared_bytes else size


def _newest_checkpoint(facts: RunFacts) -> KeptCheckpoint:
    """Return the newest checkpoint of the training, or the newest export if there is none."""
    for checkpoint in reversed(facts.checkpoints):
        if not checkpoint.is_export:
            return checkpoint
    return facts.checkpoints[-1]


def problem_cards(facts: RunFacts) -> Iterable[str]:
    texts = []
    for checkpoint in facts.checkpoints:
        if checkpoint.problems:
            texts.append(f"{checkpoint.name}: {'; '.join(checkpoint.problems)}")
    for text in (*texts, *facts.notes):
        yield f'<p class="card note">{escaped(text)}</p>'


def run_section(facts: RunFacts) -> Iterable[str]:
    yield '<h2 id="run">Run</h2><dl class="facts">'
    for name, text in _run_facts(facts).items():
        yield f"<div><dt>{escaped(name)}</dt><dd>{escaped(text)}</dd></div>"
    yield "</dl>"


def _run_facts(facts: RunFacts) -> dict[str, str]:
    """Return what is known of the run, as texts by name."""
    training = facts.training
    texts = _model_facts(facts)
    if training.ranks is not None:
        texts["ranks"] = f"{training.ranks:,}"
        texts["wrapper"] = "none" if training.wrapper in ("", "plain") else training.wrapper

    progress = training.progress
    if progress:
        samples = count_text(progress["samples"], "sample")
        texts["progress"] = f"step {progress['step']:,}, epoch {progress['epoch']:,}, {samples}"

    texts.update(_time_facts(facts))
    settings = [
        f"{name} {value}"
        for name, value in training.settings.items()
        if name != _PARAMETERS_WITH_BASE
    ]
    if settings:
        texts["settings"] = ", ".join(settings)
    if training.versions:
        versions = (f"{name} {version}" for name, version in training.versions.items())
        texts["versions"] = ", ".join(versions)

    return texts


def _model_facts(facts: RunFacts) -> dict[str, str]:
    texts: dict[str, str] = {}
    has_adapters = False
    for model in facts.models:
        kind = "model"
        if model.kind == "adapter":
            kind = "adapter"
            has_adapters = True
        texts[f"{kind} {model.name}".strip()] = _model_text(model)
        if model.base is not None:
            texts[f"base of {model.name}" if model.name else "base"] = model.base

    parameters = facts.training.settings.get(_PARAMETERS_WITH_BASE, "")
    if has_adapters and parameters.isdecimal():
        texts["parameters with the base"] = f"{int(parameters):,}"
    return texts


def _time_facts(facts: RunFacts) -> dict[str, str]:
    texts: dict[str, str] = {}
    run_seconds = facts.training.run_seconds
    if run_seconds is not None:
        restarts = count_text(facts.training.failures or 0, "restart")
        duration = f"{human_time(run_seconds)}, {restarts} after a failure"
        texts["training time until the newest save"] = duration

    timed_saves = [save for save in facts.saves if save.stall_seconds is not None]
    if timed_saves:
        saves = count_text(len(timed_saves), "save")
        waited = f"{human_time(facts.waited_seconds)} for {saves}"
        if run_seconds:
            waited += f" ({facts.waited_seconds / run_seconds:.2%} of the training time)"
        texts["training waited"] = waited

    return texts


def _model_text(model: StoredModel) -> str:
    numbers = f"{model.values:,} parameters, all trained"
    if model.trainable != model.values:  # frozen parameters and buffers are stored, too
        numbers = f"{model.trainable:,} parameters trained, {model.values:,} values stored"
    text = f"{numbers}, {', '.join(model.dtypes)}"
    return f"{model.class_name}: {text}" if model.class_name else text
