"""Compares a folder of `accelerator.save_state` with the objects that an Accelerator has prepared.

Such a folder numbers objects and parameters instead of naming them. Every file is read as
Accelerate reads it: by torch with `weights_only`, which executes nothing.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ft_ckpt.errors import LoadError, listing
from ft_ckpt.model.files import join_weight_files
from ft_ckpt.runs.optimizers import settings_of, unwrap_optimizer
from ft_ckpt.storage.local import LocalStore

# names of the files of models, optimizers, schedulers and the scaler
OF_OBJECTS = re.compile(
    r"((pytorch_)?model(_\d+)?\.(safetensors|bin)|(optimizer|scheduler)(_\d+)?\.bin|scaler\.pt)"
)


def folder_problems(path: Path, accelerator: Any) -> list[str]:
    """Name the files that Accelerate would miss, and those that it would leave unread."""
    expected = [_weights_name(path, number) for number in range(len(accelerator._models))]
    expected += _numbered_names("optimizer", accelerator._optimizers)
    expected += _numbered_names("scheduler", accelerator._schedulers)
    if accelerator.scaler is not None:
        expected.append("scaler.pt")
    names = [entry.name for entry in path.iterdir()]
    stored = {name for name in names if OF_OBJECTS.fullmatch(name)}
    problems = [f"{name}: not in the folder" for name in expected if name not in stored]
    for name in sorted(stored.difference(expected)):
        problems.append(f"{name}: of an object that this run has not")
    return problems


def _weights_name(path: Path, number: int) -> str:
    """Return the weights file of a model. If there are two, return the one Accelerate reads."""
    safe = numbered("model", number, ".safetensors")
    pickled = numbered("pytorch_model", number, ".bin")
    store = LocalStore(path)
    is_pickled = store.stat(safe) is None and store.stat(pickled) is not None
    return pickled if is_pickled else safe


def numbered(stem: str, number: int, suffix: str) -> str:
    return f"{stem}_{number}{suffix}" if number else f"{stem}{suffix}"


def _numbered_names(stem: str, objects: Sequence[Any]) -> list[str]:
    return [numbered(stem, number, ".bin") for number in range(len(objects))]


def read_values(path: Path, name: str) -> Any:
    """Read the values in a file as Accelerate does; tensors are mapped. Raises LoadError."""
    from accelerate.utils import load

    try:
        return load(path / name, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        kind = type(error).__name__
        raise LoadError(
            f"{path / name}: torch.load(weights_only=True) fails ({kind}): the file is missing or "
            "damaged, or refers to code, which is not executed; use another folder"
        ) from error


def weight_problems(path: Path, models: Sequence[nn.Module]) -> Iterator[str]:
    """Yield the models' tensors that are missing, unknown or of another shape in the folder."""
    for number, model in enumerate(models):
        file_name = _weights_name(path, number)
        values = model.state_dict(keep_vars=True).items()
        live = {_bare_name(name): value for name, value in values if isinstance(value, Tensor)}
        shapes: dict[str, tuple[int, ...]] = {}
        with closing(join_weight_files(LocalStore(path), [file_name])) as file:
            for name, spec in file.specs.items():
                shapes[_bare_name(name)] = spec.shape
            for alias, name in file.ties.items():
                shapes[_bare_name(alias)] = file.specs[name].shape

        tied = {id(live[name]) for name in shapes if name in live}
        for name, shape in shapes.items():
            if name not in live:
                yield f"{file_name}: {name}: not in the model"
            elif shape != tuple(live[name].shape):
                yield f"{file_name}: {name}: {list(shape)}, {list(live[name].shape)} in the model"

        for name, value in live.items():
            if name not in shapes and id(value) not in tied:
                yield f"{file_name}: {name}: not in the file, and the model has it"


def optimizer_problems(path: Path, accelerator: Any) -> Iterator[str]:
    """Yield the signs that the optimizers have other parameters, or another order, than the folder.

    The folder numbers the parameters, so a state could be loaded for a wrong parameter.
    """
    names: dict[int, str] = {}
    for model in accelerator._models:
        for name, parameter in model.named_parameters():
            names[id(parameter)] = name

    for number, optimizer in enumerate(accelerator._optimizers):
        file_name = numbered("optimizer", number, ".bin")
        state = read_values(path, file_name)
        try:
            for problem in _group_problems(state, unwrap_optimizer(optimizer).param_groups, names):
                yield f"{file_name}: {problem}"
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise LoadError(
                f"{path / file_name}: not the state of an optimizer; use another folder"
            ) from error


def _group_problems(
    state: Mapping[str, Any], live_groups: Sequence[Mapping[str, Any]], names: Mapping[int, str]
) -> Iterator[str]:
    """Yield the differences of an optimizer's groups.

    `names` maps the identity of a live parameter to its name.
    """
    groups = state["param_groups"]
    saved_counts = [str(len(group["params"])) for group in groups]
    live_counts = [str(len(group["params"])) for group in live_groups]
    if saved_counts != live_counts:
        yield (
            f"groups of {listing(saved_counts, ', ')} parameters in the folder, of "
            f"{listing(live_counts, ', ')} here"
        )
        return

    for number, (group, live) in enumerate(zip(groups, live_groups, strict=True)):
        live_names = [
            names.get(id(parameter), "a parameter of no prepared model")
            for parameter in live["params"]
        ]

        # The folder has names only if the optimizer was made of named parameters.
        saved_names = group.get("param_names", live_names)
        for saved_name, live_name in zip(saved_names, live_names, strict=True):
            if _bare_name(saved_name) != _bare_name(live_name):
                yield f"group {number}: {saved_name} in the folder, {live_name} here"

        for index, parameter, name in zip(group["params"], live["params"], live_names, strict=True):
            problem = _shape_problem(state["state"].get(index, {}), parameter)
            if problem is not None:
                yield f"{name}: {problem}"

        if "param_names" in group or _has_settings(group, live):
            continue
        alike = []
        for other_number, other in enumerate(live_groups):
            if _has_settings(group, other):
                alike.append(str(other_number))

        if alike:
            yield (
                f"group {number} has the settings of group {listing(alike, ', ')} here: "
                "another order"
            )


def _shape_problem(entries: Mapping[str, Any], parameter: Tensor) -> str | None:
    """Describe a shape in the state `entries` that shows that it belongs to another parameter.

    Return None if there is no such shape.
    """
    shapes: dict[str, list[int]] = {}
    for key, value in entries.items():
        if isinstance(value, Tensor) and value.ndim == parameter.ndim:
            shapes[key] = list(value.shape)
    # States without such shapes have statistics of another form, which cannot be compared.
    if not shapes or list(parameter.shape) in shapes.values():
        return None
    key, shape = next(iter(shapes.items()))
    return f"{key} has shape {shape}, the parameter {list(parameter.shape)}"


def _has_settings(group: Mapping[str, Any], live: Mapping[str, Any]) -> bool:
    """Check whether a stored group has the settings of a live one.

    The learning rate may differ if a scheduler changes it.
    """
    saved_settings = settings_of(group)
    live_settings = settings_of(live)
    keys = saved_settings.keys() & live_settings.keys() - {"param_names"}
    if "initial_lr" in keys:
        keys -= {"lr"}
    return all(saved_settings[key] == live_settings[key] for key in keys)


def _bare_name(name: str) -> str:
    """Strip the prefixes of DDP and torch.compile from the name of a tensor.

    Accelerate may have removed them.
    """
    return name.replace("_orig_mod.", "").removeprefix("module.")
