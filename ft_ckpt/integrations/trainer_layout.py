"""Finds out which files a trainer class writes in its own `_save` or `save_model`.

The method is called with a scratch folder. Its weights are not written there, because ft_ckpt saves
them. All other files are committed with the checkpoint. Weights that the method writes by itself
are accepted only if they are equal to the model's.
"""

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
# These arguments of save_pretrained change no name and no value of the tensors that it writes.
_PLAIN_ARGUMENTS = frozenset(
    {
        "state_dict",
        "is_main_process",
        "max_shard_size",
        "safe_serialization",
        "token",
        # `_recorder` checks that it names all adapters
        "selected_adapters",
    }
)


@dataclass(frozen=True)
class AddedFiles:
    """The files that a trainer adds to a checkpoint.

    Attributes:
        files: Their contents, by path in the checkpoint.
        attribute: The path of the module that the trainer saves into the folder instead of the
            whole model; None for the model.
    """

    files: Mapping[str, bytes] = field(default_factory=dict)
    attribute: str | None = None


def defining_classes(kind: type, method: str, ends: tuple[type, ...]) -> list[type]:
    """Return the classes that define `method`, in the order in which super() calls them.

    The search ends at the first of `ends`. The classes need not be trainers, because a project may
    define its methods in a mixin.
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
    """Return the files other than weights that `write` adds to the checkpoint `target`.

    `write` is called with a scratch folder that has the name of `target`. Next to it are links to
    the entries of the parent of `target`, because `write` may copy from an earlier checkpoint.
    Calls of `save_pretrained` for this folder, of the model or of one module in it, write nothing.
    `writer` is the name of the method, for errors. Raises SelectionError for weights in a layout
    that ft_ckpt does not write.
    """
    bare_model = unwrap(model)
    with temporary_store() as scratch:
        _link_neighbours(target, scratch.folder)
        folder = scratch.folder / (target.name or "checkpoint")
        folder.mkdir()
        with _without_weights(bare_model, folder) as saved_modules:
            write(str(folder))
        written = files_below(folder)

    written.pop(TRAINING_ARGS_NAME, None)
    if len(saved_modules) > 1:
        raise SelectionError(
            f"{listing(saved_modules, ', ')}: {writer} saves them into one folder, which ft_ckpt "
            "does not support; train without ft_ckpt"
        )

    attribute: str | None = None
    if saved_modules and saved_modules[0]:  # the path of the model itself is ""
        attribute = saved_modules[0]
    weights = {path: content for path, content in written.items() if _WEIGHTS.fullmatch(path)}
    if weights and not saved_modules and _are_equal_to_model(bare_model, weights):
        for path in weights:
            del written[path]
        weights = {}

    if weights:
        raise SelectionError(
            f"{listing(list(weights), ', ')}: written by {writer} itself, in a layout of its own "
            "that ft_ckpt does not know; train without ft_ckpt, or let it call super() for the "
            "weights"
        )

    return AddedFiles(written, attribute)


def _link_neighbours(target: Path, folder: Path) -> None:
    """Make links in `folder` to the entries next to `target`."""
    parent = target.absolute().parent
    if parent.is_dir():
        for entry in os.scandir(parent):
            if entry.name != target.name:
                (folder / entry.name).symlink_to(entry.path)


@contextmanager
def _without_weights(model: nn.Module, folder: Path) -> Iterator[list[str]]:
    """Replace `save_pretrained` of the models of transformers and PEFT in `model`.

    A call for `folder` then writes nothing, and the path of its module is appended to the list that
    this context yields. Calls for another folder, or with arguments that change the layout, go to
    the original method.
    """
    saved_modules: list[str] = []
    with ExitStack() as stack:
        for path, module in model.named_modules():
            if _has_plain_layout(module):
                module.save_pretrained = _recorder(module, path, folder, saved_modules)
                stack.callback(delattr, module, "save_pretrained")
        yield saved_modules


def _has_plain_layout(module: nn.Module) -> bool:
    """Check whether `save_pretrained` of the module is that of transformers or PEFT."""
    method = getattr(type(module), "save_pretrained", None)
    library = getattr(undecorated(method), "__module__", "") if method is not None else ""
    is_of_library = library.partition(".")[0] in ("transformers", "peft")
    return is_of_library and (is_pretrained(module) or is_peft_model(module))


def _recorder(module: Any, path: str, folder: Path, saved_modules: list[str]) -> Callable[..., Any]:
    """Return a `save_pretrained` that appends `path` to `saved_modules` instead of writing."""
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
        has_all_tensors = state is None or set(module.state_dict()) <= set(state)
        is_whole = has_all_adapters and has_all_tensors
        if Path(save_directory).absolute() != folder or not is_plain or not is_whole:
            return original(save_directory, *args, **settings)
        if path not in saved_modules:
            saved_modules.append(path)
        return None

    return save_pretrained


def _are_equal_to_model(model: nn.Module, weights: Mapping[str, bytes]) -> bool:
    """Check whether the files hold the model's tensors, with their names, dtypes and values."""
    stored_tensors: dict[str, torch.Tensor] = {}
    for path, content in weights.items():
        if path.endswith(".safetensors"):
            stored_tensors |= safetensors.torch.load(content)
        elif not path.endswith(".safetensors.index.json"):
            return False

    sources = ModelTensors(model).sources()
    if not stored_tensors.keys() <= sources.keys():
        return False

    # Tied tensors have the same key. One of them must be stored.
    stored_keys = {sources[name].key for name in stored_tensors}
    if any(source.key not in stored_keys for source in sources.values()):
        return False
    for name, tensor in stored_tensors.items():
        local = sources[name].local
        if local is None or sources[name].sharding.is_sharded:
            return False
        if not _are_equal(tensor, local.detach().cpu()):
            return False

    return True


def _are_equal(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Check whether two tensors have the same dtype, shape and bytes."""
    if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
        return False
    tensor_bytes = tensor.contiguous().view(-1).view(torch.uint8)
    other_bytes = other.contiguous().view(-1).view(torch.uint8)
    return torch.equal(tensor_bytes, other_bytes)
