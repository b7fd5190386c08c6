"""Repositories of the Hugging Face Hub: URLs, push, pull, model card."""

import copy
import glob
import json
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import yaml
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, RepoCard
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # not in its __all__

from ft_ckpt.checkpoint import (
    CARD_NAME,
    MANIFEST_NAME,
    LocalStaging,
    Manifest,
    OpenCheckpoint,
    PartRecord,
    checkpoint_problems,
    is_hub_name,
    is_misleading,
    load_manifest,
    manifest_from_json,
    open_staging,
    place_files,
    with_current_cards,
)
from ft_ckpt.errors import (
    ConfigError,
    CorruptError,
    ManifestError,
    MissingError,
    NameTakenError,
    TargetError,
    listing,
)
from ft_ckpt.extensions.transfer.hub_client import (
    hub_errors,
    is_transient,
    make_api,
    progress_bars,
    with_retries,
)
from ft_ckpt.extensions.transfer.outgoing import (
    OutgoingFiles,
    PullReport,
    PushOptions,
    PushReport,
    is_hidden,
    outgoing_files,
    refuse_damaged,
)
from ft_ckpt.messages import LOG
from ft_ckpt.storage import LocalStore, files_made_by, open_place, read_record, refuse_secrets

MAIN = "main"
_URL = re.compile(r"hf://(?:models/)?([^/@]+/[^/@]+)(?:@(refs/[^/]+/[^/]+|[^/]+))?(?:/(.+?))?/?")
_OTHERS = ("buckets", "collections", "datasets", "kernels", "spaces")


@dataclass(frozen=True)
class HubPlace:
    """A folder of a model repository, in one of its revisions."""

    repo_id: str
    revision: str = MAIN
    folder: str = ""

    @property
    def url(self) -> str:
        revision = "" if self.revision == MAIN else f"@{self.revision}"
        return f"hf://{self.repo_id}{revision}{self.folder and '/'}{self.folder}"

    def path_of(self, name: str) -> str:
        """The path in the repository of the file `name`."""
        return f"{self.folder}/{name}" if self.folder else name

    def names_below(self, paths: list[str]) -> list[str]:
        """The `paths` of the repository that are in this folder, relative to it."""
        start = f"{self.folder}/" if self.folder else ""
        return [path[len(start) :] for path in paths if path.startswith(start)]


def parse_place(text: str, revision: str | None = None) -> HubPlace:
    """Parse "user/name", "name" or "hf://user/name[@revision][/folder]".

    Raises ConfigError if it is not the name of a model repository, contains a token, or has a
    different `revision`.
    """
    refuse_secrets(text, "HF_TOKEN, `hf auth login` or token=")
    match = _URL.fullmatch(text)
    repo_id, named, folder = (match[1], match[2], match[3]) if match else (text, None, None)
    named = None if named is None else unquote(named)
    if "://" in repo_id or repo_id.split("/")[0] in _OTHERS:
        raise ConfigError(
            f"{text}: no model repository; expected hf://user/name, with "
            "@revision or a folder if needed"
        )
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ConfigError(
            f"{text}: no name of a model repository ({error}); expected user/name"
        ) from error
    if named is not None and revision is not None and named != revision:
        raise ConfigError(f"{text} and revision={revision!r}: two revisions; leave one out")
    return HubPlace(repo_id, named or revision or MAIN, folder or "")


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
    """The metadata of a model card."""

    name: str  # of the repository
    library: str | None
    base_id: str | None
    relation: str | None
    task: str | None
    tags: tuple[str, ...]
    metrics: Mapping[str, float]


def card_facts(
    name: str, manifest: Manifest, base_id: str | None, adapter_config: Mapping[str, Any]
) -> CardFacts:
    """The metadata of the checkpoint for the card of the repository `name`."""
    parts = [part for part in manifest.parts if part.kind != "state"]
    main = next((part for part in parts if part.path == ""), parts[0] if parts else None)
    kind = None if main is None else main.kind
    relation = (
        "adapter" if kind == "adapter" else "merge" if len(manifest.made_from) > 1 else "finetune"
    )
    tags = (f"base_model:{relation}:{base_id}",) if base_id else ()
    library = {"adapter": "peft", "model": "transformers"}.get(str(kind))
    if main is not None and main.is_of_diffusers:
        library = "diffusers"
    metrics = {
        name: value for name, value in manifest.metrics.items() if _is_result(name, value, manifest)
    }
    task = _task_of(main, adapter_config)
    return CardFacts(name, library, base_id, relation if base_id else None, task, tags, metrics)


def updated_card(text: str, facts: CardFacts) -> tuple[str, list[str]]:
    """The card with its metadata updated (byte for byte the same if nothing changes), and notes."""
    try:
        card = RepoCard(text)
    except (ValueError, yaml.YAMLError) as error:
        return text, [
            (
                f"README.md: its metadata cannot be read ({' '.join(str(error).split())}), so it "
                "stays as it is"
            )
        ]
    data: Any = card.data  # its methods are not typed
    before, notes = data.to_dict(), []
    fields = {
        "library_name": facts.library,
        "base_model": facts.base_id,
        "base_model_relation": facts.relation,
    }
    for key, value in fields.items():
        if value is not None:
            data[key] = value
    tags = data.get("tags") or []
    tags = [
        tag
        for tag in (tags if isinstance(tags, list) else [tags])
        if not _is_of_other_base(str(tag), facts)
    ]
    data["tags"] = [*tags, *(tag for tag in facts.tags if tag not in tags)] or None
    if isinstance(data.get("base_model"), str) and not is_hub_name(data["base_model"]):
        data["base_model"] = None  # a local path
    if facts.task is not None:
        data["pipeline_tag"] = data.get("pipeline_tag") or facts.task
    if facts.metrics and facts.task is None:
        notes.append("README.md: metrics are not in it, since the task of the model is not known")
    elif facts.metrics:
        found = _with_results(data.get("model-index"), facts)
        notes += (
            []
            if found
            else ["README.md: its model-index is not as the Hub has it, so metrics are not in it"]
        )
        data["model-index"] = found or data.get("model-index")
    return (text if data.to_dict() == before else str(card)), notes


def _is_of_other_base(tag: str, facts: CardFacts) -> bool:
    """Whether a tag names another base, or a local path."""
    if not tag.startswith("base_model:") or tag in facts.tags:
        return False
    return facts.base_id is not None or not is_hub_name(tag.split(":")[-1])


def _with_results(index: Any, facts: CardFacts) -> list[Any] | None:
    """The model index with this checkpoint's results instead of an older one's; None if it is
    malformed.
    """
    index = copy.deepcopy(index) if index else [{"name": facts.name, "results": []}]
    try:
        results = [
            one for one in index[0]["results"] if one["dataset"].get("name") != _DATASET["name"]
        ]
    except (AttributeError, IndexError, KeyError, TypeError):
        return None
    metrics = [
        {"type": _short_name(name), "name": name, "value": value}
        for name, value in facts.metrics.items()
    ]
    index[0]["results"] = [
        *results,
        {"task": {"type": facts.task}, "dataset": dict(_DATASET), "metrics": metrics},
    ]
    return list(index)


def _short_name(name: str) -> str:
    """The name of a metric without the prefix of its data set, such as "eval_"."""
    for start in _EVALUATED:
        for mark in "_/":
            name = name.removeprefix(f"{start}{mark}")
    return name


def _is_result(name: str, value: float, manifest: Manifest) -> bool:
    """Whether a metric is a finite evaluation result, not a measure of the training or its
    speed.
    """
    is_metric = name in manifest.rankings or name.startswith(_EVALUATED)
    return is_metric and math.isfinite(value) and not name.endswith(_NO_RESULTS)


def _task_of(part: PartRecord | None, adapter_config: Mapping[str, Any]) -> str | None:
    names = [] if part is None else [part.class_name]
    names += [str(adapter_config.get("task_type"))]
    names += [str((adapter_config.get("auto_mapping") or {}).get("base_model_class"))]
    return next(
        (task for end, task in _TASKS.items() for name in names if name.endswith(end)), None
    )


# in the staging folder: download folder of huggingface_hub, with its cache files
_ARRIVING = ".arriving"


def fetch_checkpoint(
    source: str, folder: Path | None, *, token: str | None, overwrite: bool
) -> PullReport:
    """Fetch the checkpoint at `source` into `folder`, see `push.pull`."""
    begun, place = time.monotonic(), parse_place(source)
    if folder is None:
        raise ConfigError(
            f"{source}: no folder to pull it into; the cache is for buckets, the "
            "Hub has one of its own"
        )
    _refuse_taken(folder, overwrite)
    with hub_errors(place.url, writing=False):
        api = make_api(token)
        info = api.model_info(place.repo_id, revision=place.revision)
        oid, paths = str(info.sha), [one.rfilename for one in info.siblings or ()]
        names = [name for name in place.names_below(paths) if not is_hidden(name)]
        if not names:
            raise MissingError(f"{place.url}: nothing in it; look at the name of the folder")
        with _staging_for(folder) as staging:
            _download_files(api, place, oid, names, staging.store)
            size = sum(each.size_bytes for each in staging.store.list())
            manifest = _put_in_place(staging, place) if MANIFEST_NAME in names else None
            if manifest is None:
                _refuse_taken(folder, overwrite=False)
                place_files(staging.stage, folder)
    seconds = time.monotonic() - begun
    return PullReport(folder, place.url, oid, manifest is not None, tuple(names), size, seconds)


def _refuse_taken(folder: Path, overwrite: bool) -> None:
    place = open_place(folder)
    found = None if place.is_object else place.folder.list_folder()
    if found is None or (not overwrite and (found.folders or found.objects)):
        raise NameTakenError(
            f"{folder}: exists already; choose another folder, or overwrite=True (--force)"
        )


@contextmanager
def _staging_for(folder: Path) -> Iterator[LocalStaging]:
    """A hidden staging folder, deleted at the end unless it was committed."""
    staging = open_staging(folder)
    try:
        yield staging
    finally:
        staging.discard()


def _download_files(
    api: HfApi, place: HubPlace, oid: str, names: Sequence[str], store: LocalStore
) -> None:
    """Download files of one commit into `store`."""
    arriving = store.within(_ARRIVING)
    patterns = [glob.escape(place.path_of(name)) for name in names]
    api.snapshot_download(
        place.repo_id, revision=oid, local_dir=arriving.folder, allow_patterns=patterns
    )
    for name in names:
        path = store.path(name)
        store.make_parents(path)
        arriving.path(place.path_of(name)).rename(path)
    arriving.delete_all()


def _put_in_place(staging: LocalStaging, place: HubPlace) -> Manifest:
    """Verify the files and commit them; unlisted ones, such as the card, are added to the manifest.

    Raises CorruptError if they differ from the manifest, ManifestError if that cannot be read.
    """
    store = staging.store
    manifest, _ = with_current_cards(store, load_manifest(store))
    if problems := list(checkpoint_problems(store, manifest, deep=True)):
        raise CorruptError(
            f"{place.url}: {listing(problems)}; nothing was put in place, pull another revision"
        )
    store.delete([MANIFEST_NAME])
    listed = {file.path for file in manifest.files}
    others = [read_record(store, each.name) for each in store.list() if each.name not in listed]
    manifest = replace(manifest, files=(*manifest.files, *others), number=None)
    staging.commit(manifest)
    return manifest


@dataclass(frozen=True)
class _Head:
    """The state of a repository before a push."""

    oid: str
    names: frozenset[str]  # of all files
    card: str | None
    manifest: Manifest | None  # of the checkpoint that was pushed to the same folder before
    notes: tuple[str, ...] = ()


def destination_url(destination: str, options: PushOptions) -> str:
    """The URL of the destination. Raises ConfigError if it is invalid."""
    refuse_secrets(options.base_id or "", "HF_TOKEN")
    return parse_place(destination, options.revision).url


def send_checkpoint(held: OpenCheckpoint, destination: str, options: PushOptions) -> PushReport:
    """Push an open checkpoint, see `push.push`."""
    begun = time.monotonic()
    place = parse_place(destination, options.revision)
    refuse_damaged(held)
    outgoing = outgoing_files(held, state=options.state, base_id=options.base_id)
    with hub_errors(place.url, writing=True), progress_bars(shown=not options.quiet):
        api = make_api(options.token)
        if "/" not in place.repo_id:
            place = replace(place, repo_id=f"{api.whoami()['name']}/{place.repo_id}")
        commit = partial(_commit_once, api, place, held.path, outgoing, options)
        report = with_retries(commit, is_transient)
    report = replace(report, seconds=time.monotonic() - begun)
    LOG.info(
        "pushed %s to %s%s",
        held.path.name,
        report.url,
        "" if report.is_new else ", where all of it was",
    )
    return report


def _commit_once(
    api: HfApi, place: HubPlace, path: Path, outgoing: OutgoingFiles, options: PushOptions
) -> PushReport:
    """Read the state of the repository and make one commit on top of it."""
    head = _look_at_head(api, place, options)
    files, notes = _with_card(place, outgoing, options, head)
    stale = _stale_names(place, head, files, outgoing.manifest)
    adding = [CommitOperationAdd(place.path_of(name), file) for name, file in files.items()]
    deleting = [CommitOperationDelete(place.path_of(name)) for name in stale]
    step = outgoing.manifest.step
    message = f"Push {path.name}" + ("" if step is None else f", step {step}")
    commit = api.create_commit(
        place.repo_id,
        [*adding, *deleting],
        commit_message=options.message or message,
        revision=place.revision,
        parent_commit=head.oid,
    )
    sizes = {one.path_in_repo: one.upload_info.size for one in adding}
    _check_arrived(api, place, commit.oid, sizes)
    return PushReport(
        path=path,
        url=place.url,
        repo_id=place.repo_id,
        oid=commit.oid,
        commit_url=commit.commit_url,
        is_new=commit.oid != head.oid,
        files=tuple(sorted(sizes)),
        deleted=tuple(place.path_of(name) for name in stale),
        bytes=sum(sizes.values()),
        seconds=0.0,
        notes=(*outgoing.notes, *notes, *head.notes),
    )


def _look_at_head(api: HfApi, place: HubPlace, options: PushOptions) -> _Head:
    """The state of the repository; creates it, or its branch.

    Raises TargetError if it is public and must not be.
    """
    try:
        info = api.model_info(place.repo_id, revision=place.revision)
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        if isinstance(error, RepositoryNotFoundError):
            api.create_repo(place.repo_id, private=options.private, exist_ok=True)
        if place.revision != MAIN:
            api.create_branch(place.repo_id, branch=place.revision, exist_ok=True)
        info = api.model_info(place.repo_id, revision=place.revision)
    if options.private and info.private is False:
        raise TargetError(
            f"{place.url}: public, and private=True was asked for; make it "
            "private, nothing was pushed"
        )
    names = frozenset(one.rfilename for one in info.siblings or ())
    card = _remote_text(api, place, info.sha, CARD_NAME, names)
    text = _remote_text(api, place, info.sha, MANIFEST_NAME, names)
    try:
        manifest = None if text is None else manifest_from_json(text, place.path_of(MANIFEST_NAME))
    except ManifestError as error:
        return _Head(
            str(info.sha),
            names,
            card,
            None,
            (f"an older checkpoint's manifest was replaced: {error}",),
        )
    return _Head(str(info.sha), names, card, manifest)


def _remote_text(
    api: HfApi, place: HubPlace, oid: Any, name: str, names: frozenset[str]
) -> str | None:
    path = place.path_of(name)
    if path not in names:
        return None
    download = partial(api.hf_hub_download, place.repo_id, path, revision=str(oid))
    contents = files_made_by(lambda folder: download(local_dir=folder))
    return contents[path].decode("utf-8", "replace")


def _with_card(
    place: HubPlace, outgoing: OutgoingFiles, options: PushOptions, head: _Head
) -> tuple[dict[str, Path | bytes], list[str]]:
    """The files with the repository's updated card; below its root a card is an ordinary file."""
    files = dict(outgoing.files)
    if place.folder:
        return files, []
    name, own = place.repo_id.split("/")[-1], outgoing.content(CARD_NAME).decode("utf-8", "replace")
    step = outgoing.manifest.step
    what = "a model" if step is None else f"a model after step {step:,}"
    text = options.card or head.card or own or _BLANK.format(name=name, what=what)
    adapter = json.loads(outgoing.content("adapter_config.json") or b"{}")
    facts = card_facts(name, outgoing.manifest, outgoing.base_id, adapter)
    text, notes = updated_card(text, facts)
    files[CARD_NAME] = text.encode("utf-8")
    return files, notes


def _stale_names(
    place: HubPlace, head: _Head, files: Iterable[str], manifest: Manifest
) -> list[str]:
    """Files of older checkpoints: those in the old manifest, and those that loaders would confuse
    with new ones.
    """
    sent, older = (
        set(files),
        {file.path for file in head.manifest.files} if head.manifest else set(),
    )
    beside = [name for name in place.names_below(sorted(head.names)) if name not in sent]
    return [name for name in beside if name in older or is_misleading(name, manifest)]


def _check_arrived(api: HfApi, place: HubPlace, oid: str, sizes: dict[str, int]) -> None:
    """Compare the commit with the sent files: a .gitignore in the repository drops files
    silently.
    """
    tree = api.list_repo_tree(place.repo_id, recursive=True, revision=oid)
    arrived = {entry.path: entry.size for entry in tree if isinstance(entry, RepoFile)}
    if absent := [path for path, size in sizes.items() if arrived.get(path) != size]:
        raise TargetError(
            f"{place.url}: {listing(absent, ', ')} not in the commit {oid[:8]} as sent; look for a "
            ".gitignore there"
        )
