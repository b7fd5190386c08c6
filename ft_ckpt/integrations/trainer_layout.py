"""The files of a Trainer's own `_save` or `save_model`, and their layout of weights."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from inspect import unwrap as undecorated
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn
from transformers.trainer import TRAINING_ARGS_NAME

from ft_ckpt.errors import SelectionError, listing
from ft_ckpt.model.tensors import is_peft_model, is_pretrained
from ft_ckpt.ranks.wrappers import ModelTensors, unwrap
from ft_ckpt.storage.local import temporary_store
from ft_ckpt.storage.places import files_below

_WEIGHTS = re.compile(
    r"((pytorch_)?model|adapter_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?"
)
# Arguments of save_pretrained that change no name and no value of what is written.
_PLAIN_ARGUMENTS = frozenset(
    {
        "state_dict",
        "is_main_process",
        "max_shard_size",
        "safe_serialization",
        "token",
        "selected_adapters",  # if it names all adapters
    }
)


@dataclass(frozen=True)
class AddedFiles:
    """The files that a trainer adds to a checkpoint."""

    files: Mapping[str, bytes] = field(default_factory=dict)  # by path in the checkpoint
    # path of the module whose weights belong into the folder itself; None: the model
    attribute: str | None = None


def defining_classes(kind: type, method: str, ends: tuple[type, ...]) -> list[type]:
    """Return the classes that define `method`, as super() calls them, up to the first of `ends`.

    The classes need not be trainers: a project may have its methods in mixins without a base.
    """
    classes = []
    for base in kind.__mro__:
        if base in ends:
            break
        if method in vars(base):
            classes.append(base)
    return classes


def ends_chain(kind: type, method: str) -> bool:
    """Check whether the code of `method` in the class `kind` never names super()."""
    code = getattr(undecorated(vars(kind)[method]), "__code__", None)
    return code is not None and "super" not in code.co_names


def collect_files(
    model: nn.Module, target: Path, write: Callable[[str], object], writer: str
) -> AddedFiles:
    """Return the files that `write` puts into a folder in the place of `target`, without weights.

    ft_ckpt writes the weights. The folder has the name of `target` and stands next to links to the
    entries of its parent, from which `write` may copy. `save_pretrained` of the model, or of one
    module in it, writes nothing there. `writer` is the name of the method for errors. Raises
    SelectionError for weights in a layout that ft_ckpt does not write.
    """
    inside = unwrap(model)
    with temporary_store() as scratch:
        _link_neighbours(target, scratch.folder)
        folder = scratch.folder / (target.name or "checkpoint")
        folder.mkdir()
        with _without_weights(inside, folder) as saved:
            write(str(folder))
        written = files_below(folder)
    written.pop(TRAINING_ARGS_NAME, None)
    if len(saved) > 1:
        raise SelectionError(
            f"{listing(saved, ', ')}: {writer} saves them into one folder, which ft_ckpt does not "
            "support; train without ft_ckpt"
        )
    attribute = saved[0] if saved and saved[0] else None
    weights = [path for path in written if _WEIGHTS.fullmatch(path)]
    if weights and not saved and _are_live(inside, {path: written[path] for path in weights}):
        written = {path: content for path, content in written.items() if path not in weights}
        weights = []
    if weights:
        raise SelectionError(
            f"{listing(weights, ', ')}: written by {writer} itself, in a layout of its own that "
            "ft_ckpt does not know; train without ft_ckpt, or let it call super() for the weights"
        )
    return AddedFiles(written, attribute)


def _link_neighbours(target: Path, folder: Path) -> None:
    parent = target.absolute().parent
    if parent.is_dir():
        for entry in os.scandir(parent):
            if entry.name != target.name:
                (folder / entry.name).symlink_to(entry.path)


@contextmanager
def _without_weights(model: nn.Module, folder: Path) -> Iterator[list[str]]:
    """Replace `save_pretrained` in `model` by a function that writes nothing.

    The methods of transformers' and PEFT's models are replaced. Yields the paths of the modules
    that were saved into `folder`. Calls for another folder, or with arguments that change the
    layout, go to the method itself.
    """
    saved: list[str] = []
    with ExitStack() as stack:
        for path, module in model.named_modules():
            if _has_plain_layout(module):
                module.save_pretrained = _recorder(module, path, folder, saved)
                stack.callback(delattr, module, "save_pretrained")
        yield saved


def _has_plain_layout(module: nn.Module) -> bool:
    """Check whether `save_pretrained` of the module is that of transformers or PEFT."""
    method = getattr(type(module), "save_pretrained", None)
    library = getattr(undecorated(method), "__module__", "") if method is not None else ""
    is_of_library = library.partition(".")[0] in ("transformers", "peft")
    return is_of_library and (is_pretrained(module) or is_peft_model(module))


def _recorder(module: Any, path: str, folder: Path, saved: list[str]) -> Callable[..., Any]:
    original = module.save_pretrained

    def save_pretrained(save_directory: Any, *args: Any, **settings: Any) -> Any:
        is_plain = (
            not args
            and settings.keys() <= _PLAIN_ARGUMENTS
            and settings.get("safe_serialization", True)
        )
        state = settings.get("state_dict")
        adapters = settings.get("selected_adapters")
        has_all_adapters = adapters is None or set(module.peft_config) <= set(adapters)
        is_whole = has_all_adapters and (state is None or set(module.state_dict()) <= set(state))
        if Path(save_directory).absolute() != folder or not is_plain or not is_whole:
            return original(save_directory, *args, **settings)
        if path not in saved:
            saved.append(path)
        return None

    return save_pretrained


def _are_live(model: nn.Module, weights: Mapping[str, bytes]) -> bool:
    """Check whether the files hold the model's tensors, with their names, dtypes and values."""
    stored: dict[str, torch.Tensor] = {}
    for path, content in weights.items():
        if path.endswith(".safetensors"):
            stored |= safetensors.torch.load(content)
        elif not path.endswith(".safetensors.index.json"):
            return False
    live = ModelTensors(model).sources()
    if not stored.keys() <= live.keys():
        return False
    stored_keys = {live[name].key for name in stored}
    if any(source.key not in stored_keys for source in live.values()):
        return False
    for name, tensor in stored.items():
        local = live[name].local
        if local is None or live[name].sharding.is_sharded:
            return False
        if not _are_equal(tensor, local.detach().cpu()):
            return False
    return True


def _are_equal(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
        return False
    first = tensor.contiguous().view(-1).view(torch.uint8)
    second = other.contiguous().view(-1).view(torch.uint8)
    return torch.equal(first, second)
