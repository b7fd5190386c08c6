"""Describes what a place contains, for a user who has named another place than expected.

A place is a file or folder on a disk, or an object or prefix in a bucket. Its contents are
recognised by the names of files and folders, without importing torch. Small JSON files are read for
the class of a model, the step of a checkpoint or the base of an adapter. No file is changed.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ft_ckpt.checkpoint.manifest.manifest import DIFFUSERS_LORA_FILE, MANIFEST_NAME
from ft_ckpt.errors import CheckpointError, listing
from ft_ckpt.formats import tensor_formats
from ft_ckpt.messages import did_you_mean, short_repr
from ft_ckpt.storage import Folder, FolderListing, Store, read_text
from ft_ckpt.storage.places import Place, shown_location

# Every folder of Accelerate's `save_state` has this file, and no other folder has it.
ACCELERATE_MARKER = "random_states_0.pkl"
# Kinds of contents that ft_ckpt wrote. All other kinds come from other programs.
CHECKPOINT, RUN, RUNS = "checkpoint", "run", "folder of runs"
# Kinds without weights directly in the folder, or with weights that only their program reads.
UNREADABLE = {"absent", "empty", RUN, RUNS, "Trainer output", "folder of models", "DeepSpeed"}
# Kinds of folders that a user may have meant.
_LOADABLE = (
    "Accelerate",
    "Trainer output",
    "model",
    "adapter",
    "sentence-transformers",
    "diffusers model",
    "diffusers pipeline",
    "diffusers LoRA",
)
_WITHOUT = f"without a manifest of ft_ckpt ({MANIFEST_NAME})"
# At most 32 folders in the place are described, and at most 4 folders in each of these.
_MAX_FOLDERS = (32, 4)
_MAX_DOCUMENT_BYTES = 1 << 20
_STEP_FOLDER = re.compile(r"(?:checkpoint|step|epoch)[-_]?(\d+)")
_ACCELERATE_FOLDER = re.compile(r"checkpoints|checkpoint_\d+")
_DCP_METADATA = ".metadata"
_DEEPSPEED_ADVICE = "its zero_to_fp32.py writes the weights as files that every function here reads"
_DEEPSPEED_FILES = re.compile(
    r"zero_to_fp32\.py|mp_rank_\d+.*_states\.pt|.*zero_pp_rank_\d+.*_states\.pt"
)


@dataclass(frozen=True)
class Contents:
    """What is at a place."""

    kind: str
    """"absent", "file", "empty", CHECKPOINT, RUN or RUNS for those of ft_ckpt; of other programs
    "Trainer checkpoint", "Trainer output", "model", "adapter", "sentence-transformers", "diffusers
    model", "diffusers pipeline", "diffusers LoRA", "Accelerate", "DeepSpeed",
    "torch.distributed.checkpoint", "weights", "folder of models"; "other" for everything else.
    """
    text: str
    """In words, as in "a Hugging Face model (LlamaForCausalLM) without a manifest of ft_ckpt"."""
    advice: str
    """What to do with it, or instead."""
    names: tuple[str, ...] = ()
    """The checkpoints, runs, models or weight files in it."""

    def sentence(self, place: object) -> str:
        """Return the text of an error or answer: the place, what it contains, what to do."""
        shown = shown_location(place.location) if isinstance(place, Place) else place
        return f"{shown}: {self.text}; {self.advice}"


def describe_contents(place: Place) -> Contents:
    """Describe what `place` contains. Raises UnreadableError if it cannot be listed."""
    folder = place.folder
    parent, name = folder.parent, place.basename
    if parent is not None and parent.stat(name) is not None:
        return _describe_file(place)
    listed = folder.list_folder()
    if not listed.exists:
        siblings = (
            []
            if parent is None
            else [entry.name for entry in visible_folders(parent.list_folder())]
        )
        advice = did_you_mean([name], siblings) or "`ft-ckpt ls` lists the checkpoints of a run"
        return Contents("absent", "no such folder", advice)

    return _describe_folder(folder, listed, _MAX_FOLDERS)


def why_no_checkpoint(place: Place) -> str:
    """Say why there is no checkpoint of ft_ckpt at `place`, what it contains, and what to do."""
    contents = describe_contents(place)
    if contents.kind == CHECKPOINT:  # not when it was opened
        return f"{place}: is being replaced or deleted; try again"
    return contents.sentence(place)


def visible_folders(listed: FolderListing) -> list[Folder]:
    """Return the folders that are not hidden: hidden ones are unfinished saves, or internal."""
    return [folder for folder in listed.folders if not folder.name.startswith(".")]


def _describe_file(place: Place) -> Contents:
    suffix = "." + place.basename.rpartition(".")[2]
    formats = [entry.name for entry in tensor_formats() if suffix in entry.suffixes]
    is_weights = bool(formats)
    text = f"a {formats[0]} file" if is_weights else "a file"
    for store, _ in place.folders_around(levels=2):
        if store.url != place.folder.url and store.stat(MANIFEST_NAME) is not None:
            return Contents("file", f"{text} of the checkpoint {store.url}", "give that folder")
    advice = (
        "`ft-ckpt show` and `ft-ckpt convert` read single files"
        if is_weights
        else "give the folder that it is in"
    )
    return Contents("file", f"{text}, expected a folder", advice)


def _describe_folder(store: Store, listed: FolderListing, max_folders: tuple[int, ...]) -> Contents:
    """Describe a folder, and at most `max_folders` of the folders in it, for each level."""
    files = {entry.name for entry in listed.objects}
    if MANIFEST_NAME in files:
        return Contents(CHECKPOINT, "a checkpoint of ft_ckpt", "`ft-ckpt show` describes it")
    below: dict[str, Contents] = {}
    if max_folders:
        newest_first = sorted(visible_folders(listed), key=_folder_order, reverse=True)
        for folder in reversed(newest_first[: max_folders[0]]):
            inner = store.within(folder.name)
            below[folder.name] = _describe_folder(inner, inner.list_folder(), max_folders[1:])

    return (
        _describe_run(below)
        or _describe_foreign(store, files)
        or _describe_parent(below)
        or _describe_rest(files, listed)
    )


def _folder_order(folder: Folder) -> tuple[bool, int, str]:
    """Sort numbered checkpoints after all other folders, so that the newest ones come last."""
    match = _STEP_FOLDER.fullmatch(folder.name)
    return match is not None, int(match[1]) if match else 0, folder.name


def _of_kind(below: Mapping[str, Contents], *kinds: str) -> tuple[str, ...]:
    return tuple(name for name, contents in below.items() if contents.kind in kinds)


def _describe_run(below: Mapping[str, Contents]) -> Contents | None:
    """Describe a folder with checkpoints of ft_ckpt or transformers directly below it."""
    checkpoints = _of_kind(below, CHECKPOINT)
    foreign = _of_kind(below, "Trainer checkpoint")
    if checkpoints:
        beside = f", and {listing([*foreign], ', ')} {_WITHOUT}" if foreign else ""
        text = f"the folder of a run, which holds {listing([*checkpoints], ', ')}{beside}"
        return Contents(RUN, text, "name one of them", checkpoints)

    if foreign:
        text = f"a Trainer's output_dir with {listing([*foreign], ', ')} {_WITHOUT}"
        return Contents(
            "Trainer output",
            text,
            "`trainer.train(resume_from_checkpoint=True)` resumes them",
            foreign,
        )

    return None


def _describe_foreign(store: Store, files: set[str]) -> Contents | None:
    """Describe a folder that another program has written."""
    weights = _weight_names(files)
    if "trainer_state.json" in files:
        return _describe_trainer_checkpoint(store)
    if ACCELERATE_MARKER in files:
        advice = "`saver.resume(path)` and `accelerator.load_state(path)` read it"
        return Contents("Accelerate", "a folder of Accelerate's save_state", advice)

    if "model_index.json" in files:
        cls = class_in(document_in(store, "model_index.json"), "a pipeline")
        advice = "`DiffusionPipeline.from_pretrained(path)` loads it"
        return Contents("diffusers pipeline", f"a pipeline of diffusers ({cls}) {_WITHOUT}", advice)

    if {"modules.json", "config_sentence_transformers.json"} <= files:
        text = f"a model of sentence-transformers {_WITHOUT}"
        return Contents("sentence-transformers", text, "`SentenceTransformer(path)` loads it")

    if "adapter_config.json" in files:
        return _describe_adapter(document_in(store, "adapter_config.json"))
    if "config.json" in files and weights:
        return _describe_model(document_in(store, "config.json"))
    if any(name.startswith(DIFFUSERS_LORA_FILE) for name in weights):
        advice = "`pipeline.load_lora_weights(path)` loads them"
        return Contents("diffusers LoRA", f"LoRA weights of diffusers {_WITHOUT}", advice, weights)

    if _DCP_METADATA in files:
        kind = "torch.distributed.checkpoint"
        return Contents(
            kind, f"a folder of {kind}", "`ft-ckpt show` and `ft-ckpt convert` read its weights"
        )

    if any(_DEEPSPEED_FILES.fullmatch(name) for name in files):
        return Contents("DeepSpeed", "a checkpoint of DeepSpeed", _DEEPSPEED_ADVICE)
    if weights:
        text = (
            f"weights ({listing([*weights], ', ')}), no config, and no manifest of ft_ckpt "
            f"({MANIFEST_NAME})"
        )
        advice = (
            "no save was completed there, or another program wrote it; `ft-ckpt show` lists "
            "their tensors"
        )
        return Contents("weights", text, advice, weights)

    return None


def _describe_trainer_checkpoint(store: Store) -> Contents:
    step = document_in(store, "trainer_state.json").get("global_step")
    at_step = f" of step {step}" if type(step) is int else ""
    text = f"a checkpoint{at_step} of transformers' Trainer {_WITHOUT}"
    advice = (
        "`trainer.train(resume_from_checkpoint=path)` resumes it, `from_pretrained(path)` "
        "loads its model"
    )
    return Contents("Trainer checkpoint", text, advice)


def _describe_adapter(config: Mapping[str, Any]) -> Contents:
    base = config.get("base_model_name_or_path")
    on_base = f" on {short_repr(base, 80)[1:-1]}" if isinstance(base, str) and base else ""
    advice = (
        "`PeftModel.from_pretrained(base, path)` loads it, `ft-ckpt merge` merges it into its base"
    )
    return Contents("adapter", f"a PEFT adapter{on_base} {_WITHOUT}", advice)


def _describe_model(config: Mapping[str, Any]) -> Contents:
    cls = class_in(config, "AutoModel")
    advice = f"`{cls}.from_pretrained(path)` loads it"
    if "_diffusers_version" in config:
        return Contents("diffusers model", f"a model of diffusers ({cls}) {_WITHOUT}", advice)
    return Contents("model", f"a Hugging Face model ({cls}) {_WITHOUT}", advice)


def _describe_parent(below: Mapping[str, Contents]) -> Contents | None:
    """Describe a folder whose folders have contents that a user may have meant."""
    runs = _of_kind(below, RUN)
    if runs:
        return Contents(
            RUNS, f"a folder of runs: {listing([*runs], ', ')}", "name one of them", runs
        )

    states = tuple(
        name for name in _of_kind(below, "Accelerate") if _ACCELERATE_FOLDER.fullmatch(name)
    )
    if states:
        text = f"a project folder of Accelerate with {listing([*states], ', ')}"
        return Contents("Accelerate", text, "`saver.resume(path)` reads the newest", states)

    if _of_kind(below, "DeepSpeed"):
        return Contents("DeepSpeed", "a checkpoint of DeepSpeed", _DEEPSPEED_ADVICE)
    loadable = _of_kind(below, *_LOADABLE)
    if loadable:
        kinds = [f"{name} ({below[name].kind})" for name in loadable]
        text = f"no checkpoints of ft_ckpt in it, but {listing(kinds, ', ')}"
        return Contents("folder of models", text, "name one of them", loadable)

    return None


def _describe_rest(files: set[str], listed: FolderListing) -> Contents:
    if any(".ft_ckpt-stage-" in folder.name for folder in listed.folders):
        advice = f"no save was completed there: a checkpoint has a {MANIFEST_NAME}"
        return Contents("empty", "only unfinished saves", advice)
    visible = sorted(name for name in files if not name.startswith("."))
    names = [*visible, *(f"{folder.name}/" for folder in visible_folders(listed))]
    if not names:
        return Contents("empty", "an empty folder", "no save was completed there")
    text = f"neither checkpoints nor weights in it, but {listing(names, ', ', 4)}"
    return Contents("other", text, f"a checkpoint of ft_ckpt has a {MANIFEST_NAME}")


def _weight_names(files: Iterable[str]) -> tuple[str, ...]:
    """Return the files with the name of weights in some format, and indexes of shards."""
    endings = [".safetensors.index.json", ".bin.index.json"]
    for known_format in tensor_formats():
        endings += known_format.suffixes
    return tuple(sorted(name for name in files if name.endswith(tuple(endings))))


def class_in(config: Mapping[str, Any], otherwise: str) -> str:
    """Return the class in a config of transformers or diffusers, or `otherwise` without one."""
    classes = config.get("architectures")
    cls = classes[0] if isinstance(classes, list) and classes else config.get("_class_name")
    return cls if isinstance(cls, str) and cls.isidentifier() else otherwise


def document_in(store: Store, name: str, max_bytes: int = _MAX_DOCUMENT_BYTES) -> Mapping[str, Any]:
    """Read the JSON object `name`; return {} if it is missing, damaged or too large."""
    try:
        document = json.loads(read_text(store, name, max_bytes))
    except (CheckpointError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
