"""Files that readers would take for the weights of a checkpoint, though it does not list them.

Such a file is left from another save: from_pretrained prefers model.safetensors to an index, vLLM
reads every shard, and an adapter_config.json next to a model is applied to it. An adapter's folder
may be its base's: only names of adapters count there.
"""

import re
from pathlib import PurePosixPath

from ft_ckpt.checkpoint.manifest.manifest import DIFFUSERS_LORA_FILE, DIFFUSERS_MODEL_FILE, Manifest
from ft_ckpt.errors import Problem
from ft_ckpt.storage import Store

_WEIGHTS = r"(-\d+-of-\d+)?\.(safetensors|bin|h5)(\.index\.json)?"
_NAMES_BY_KIND = {
    "model": re.compile(
        rf"((pytorch_)?model|{DIFFUSERS_MODEL_FILE}){_WEIGHTS}|adapter_config\.json"
    ),
    "module": re.compile(rf"(pytorch_)?model{_WEIGHTS}|adapter_config\.json"),
    "adapter": re.compile(rf"(adapter_model|{DIFFUSERS_LORA_FILE}){_WEIGHTS}"),
}


def is_misleading(path: str, manifest: Manifest) -> bool:
    """Check whether readers would load `path` as weights although it is not in the manifest."""
    folder, name = str(PurePosixPath(path).parent), PurePosixPath(path).name
    kinds = {part.kind for part in manifest.parts if (part.path or ".") == folder}
    patterns = [_NAMES_BY_KIND[kind] for kind in kinds if kind in _NAMES_BY_KIND]
    if not any(pattern.fullmatch(name) for pattern in patterns):
        return False
    return all(file.path != path for file in manifest.files)


def misleading_files(store: Store, manifest: Manifest) -> list[str]:
    """Return, sorted, the misleading files in the folders of the manifest's parts."""
    paths: list[str] = []
    for part_path in {part.path for part in manifest.parts}:
        listing = store.list_folder(part_path)
        paths += [stored.name for stored in listing.objects]
        paths += [f"{part_path}/{folder.name}".lstrip("/") for folder in listing.folders]
    return sorted(path for path in paths if is_misleading(path, manifest))


def misleading_problem(name: str) -> Problem:
    """Return the problem of a file that `misleading_files` names."""
    where = "not of this checkpoint, and readers would take it for its weights; move it away"
    return Problem(f"{name}: {where}")
