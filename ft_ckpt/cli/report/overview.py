"""The first lines of the page, and the facts about the run by name."""

from collections.abc import Iterable

from ft_ckpt.cli.plan import human_time
from ft_ckpt.cli.report.charts import escaped
from ft_ckpt.cli.report.facts import RunFacts, StoredModel
from ft_ckpt.cli.report.texts import count_text, moment_text, value_text
from ft_ckpt.values import human_size


def lead_text(facts: RunFacts) -> str:
    shared = sum(checkpoint.size_bytes for checkpoint in facts.checkpoints) - facts.disk_bytes
    size = human_size(facts.disk_bytes) + (f", {human_size(shared)} shared" if shared else "")
    sentences = [f"{count_text(len(facts.checkpoints), 'checkpoint')}, {size}."]
    dropped = len(facts.dropped_saves)
    if facts.saves:
        saves = count_text(len(facts.saves), "logged save")
        verb = "was" if dropped == 1 else "were"
        sentences.append(f"Of {saves}, {dropped or 'none'} {verb} deleted since.")
    newest = facts.checkpoints[-1]
    for checkpoint in reversed(facts.checkpoints):
        if not checkpoint.is_export:
            newest = checkpoint
            break
    sentences.append(f"Newest: {newest.name}, {moment_text(newest.created)} UTC.")
    for metric in facts.rankings:
        best = facts.best_checkpoint(metric)
        if best is not None:
            sentences.append(f"Best {metric}: {value_text(best.metrics[metric])}, {best.name}.")
    return " ".join(sentences)


def problem_cards(facts: RunFacts) -> Iterable[str]:
    broken = [
        f"{checkpoint.name}: {'; '.join(checkpoint.problems)}"
        for checkpoint in facts.checkpoints
        if checkpoint.problems
    ]
    for text in (*broken, *facts.notes):
        yield f'<p class="card note">{escaped(text)}</p>'


def run_section(facts: RunFacts) -> Iterable[str]:
    yield '<h2 id="run">Run</h2><dl class="facts">'
    for name, text in _run_facts(facts).items():
        yield f"<div><dt>{escaped(name)}</dt><dd>{escaped(text)}</dd></div>"
    yield "</dl>"


def _run_facts(facts: RunFacts) -> dict[str, str]:
    """The facts by name, as text; those that are unknown are left out."""
    training, texts = facts.training, {}
    for model in facts.models:
        kind = "adapter" if model.kind == "adapter" else "model"
        texts[f"{kind} {model.name}".strip()] = _model_text(model)
        if model.base is not None:
            texts[f"base of {model.name}" if model.name else "base"] = model.base
    settings = dict(training.settings)
    whole = settings.pop("parameters", "")
    has_adapters = any(model.kind == "adapter" for model in facts.models)
    if whole.isdecimal() and has_adapters:
        texts["parameters with the base"] = f"{int(whole):,}"
    if training.ranks is not None:
        texts["ranks"] = f"{training.ranks:,}"
        texts["wrapper"] = "none" if training.wrapper in ("", "plain") else training.wrapper
    progress = training.progress
    if progress:
        samples = count_text(progress["samples"], "sample")
        texts["progress"] = f"step {progress['step']:,}, epoch {progress['epoch']:,}, {samples}"
    if training.run_seconds is not None:
        restarts = count_text(training.failures or 0, "restart")
        duration = f"{human_time(training.run_seconds)}, {restarts} after a failure"
        texts["training time until the newest save"] = duration
    timed = [save for save in facts.saves if save.stall_seconds is not None]
    if timed:
        waited = f"{human_time(facts.waited_seconds)} for {count_text(len(timed), 'save')}"
        if training.run_seconds:
            waited += f" ({facts.waited_seconds / training.run_seconds:.2%} of the training time)"
        texts["training waited"] = waited
    if settings:
        texts["settings"] = ", ".join(f"{name} {value}" for name, value in settings.items())
    if training.versions:
        versions = (f"{name} {version}" for name, version in training.versions.items())
        texts["versions"] = ", ".join(versions)
    return texts


def _model_text(model: StoredModel) -> str:
    numbers = f"{model.values:,} parameters, all trained"
    if model.trainable != model.values:  # frozen ones and buffers are stored, too
        numbers = f"{model.trainable:,} parameters trained, {model.values:,} values stored"
    numbers += f", {', '.join(model.dtypes)}"
    return f"{model.class_name}: {numbers}" if model.class_name else numbers
