"""Describes a plain `nn.Module` as JSON, and rebuilds it without running its constructor or importing its code.

A value head, for example, has no config to rebuild it from. `describe_module` records classes, simple attributes,
parameter and buffer shapes; `build_module` rebuilds the tree from classes that this process has already imported, or
that are part of transformers, with parameters on the meta device. The values come from the weights file.
"""

import base64
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from ft_ckpt.distributed.wrappers import is_engine_attribute, is_engine_code, layout_of, unwrap, user_class
from ft_ckpt.errors import LoadError, SelectionError, listing, shown
from ft_ckpt.formats.dtypes import dtype_name, dtype_of
from ft_ckpt.formats.pytree import decode_value, encode_value, imported_module
from ft_ckpt.messages import warn
from ft_ckpt.model.adapters import without_adapters
from ft_ckpt.model.settings import MODULE_NAME

DESCRIPTION_FORMAT = 1  # incremented when an older reader could misread a newer description

Shapes = Mapping[str, Sequence[int]]

_INTERNAL = frozenset(vars(nn.Module())) | {name for name in dir(nn.Module) if name.startswith("_")}
_CONVERSIONS = frozenset({"type", "float", "half", "double", "cpu", "cuda"})  # methods that user attributes may shadow
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_MAX_BUFFER_BYTES = 16 << 20  # a non-persistent buffer larger than this is described by its shape only


def global_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Full shape of a parameter that may be sharded (ZeRO-3, DTensor); its values are not touched."""
    return layout_of(tensor).shape


def module_text(module: nn.Module, shapes: Shapes | None = None, *, adapters: bool = True) -> str:
    """The text of `module.json`; arguments as for `describe_module`."""
    described = describe_module(module, shapes, adapters=adapters)
    return json.dumps(described) + "\n"  # indent would use the Python encoder, ten times slower


def describe_module(module: nn.Module, shapes: Shapes | None = None, *, adapters: bool = True) -> dict[str, Any]:
    """A JSON tree from which `build_module` builds an equal module.

    `shapes`: global shapes by canonical parameter name, for engines with flat shards (FSDP1). By default the shapes are
    those of the parameters (`ds_shape` under ZeRO-3). Without `adapters`, base layers are described instead of PEFT's.
    """
    return {"format": DESCRIPTION_FORMAT, **_ModuleDescriber(shapes or {}, adapters).describe_node(module, "")}


def build_module(description: Mapping[str, Any], classes: Mapping[str, type] | None = None) -> nn.Module:
    """Build the module of a description: parameters and persistent buffers on the meta device, in train mode.

    `classes`: "package.module:Class" or "Class" -> class; they take precedence over imported classes. No constructor of
    a class runs, and only modules of transformers are imported. A warning names attributes that were not recorded.
    Raises LoadError when a class is not available or not an nn.Module, or the description is malformed.
    """
    try:
        version = description["format"]
        if version > DESCRIPTION_FORMAT:
            raise LoadError(f"{MODULE_NAME}: format {version}, this ft_ckpt reads up to {DESCRIPTION_FORMAT}; upgrade")
        known = _find_classes(description, classes or {})
        _warn_opaque(description)
        return _ModuleBuilder(known).build_node(description, "")
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        if isinstance(error, LoadError):
            raise LoadError(f"{MODULE_NAME}: {str(error).removeprefix(f'{MODULE_NAME}: ')}") from error
        raise LoadError(f"{MODULE_NAME}: malformed description ({shown(error)}); the checkpoint is damaged") from error


class _ModuleDescriber:
    """One traversal of a module; a tensor or module that occurs again is recorded as `same_as` its first name."""

    def __init__(self, shapes: Shapes, adapters: bool) -> None:
        self.shapes, self.inside = shapes, unwrap if adapters else without_adapters
        self.left_out = _INTERNAL if adapters else _INTERNAL | {"peft_config"}
        self.names: dict[int, str] = {}
        self.user_class: Callable[[type], type] = cache(user_class)  # few classes, many modules
        self.is_method: Callable[[type, str], bool] = cache(_is_method)

    def describe_node(self, module: nn.Module, path: str) -> dict[str, Any]:
        module = self.inside(module)
        if id(module) in self.names:
            return {"same_as": self.names[id(module)]}
        self.names[id(module)] = path
        cls = self.user_class(type(module))
        parameters = self.describe_parameters(module, path)
        attributes, opaque = self.simple_attributes(module, cls, {parameter["name"] for parameter in parameters})
        return {
            "class": f"{cls.__module__}:{cls.__qualname__}",
            "attributes": attributes,
            "parameters": parameters,
            "buffers": [self.describe_buffer(module, name, path) for name in module._buffers],
            "children": [
                [name, None if child is None else self.describe_node(child, _join_path(path, name))]
                for name, child in module._modules.items()
            ],
            "opaque": [*opaque, *_own_hooks(module)],
        }

    def simple_attributes(self, module: nn.Module, cls: type, parameters: set[str]) -> tuple[dict[str, Any], list[str]]:
        """The attributes that can be encoded as JSON, and the names of the others."""
        simple: dict[str, Any] = {}
        opaque: list[str] = []
        for name, value in vars(module).items():
            if name in self.left_out or name in parameters or is_engine_attribute(name, value):
                continue
            if self.is_method(cls, name):  # a description has no code
                opaque.append(name)
                continue
            try:
                simple[name] = encode_value(value)
            except SelectionError:
                opaque.append(name)
        return simple, opaque

    def describe_parameters(self, module: nn.Module, path: str) -> list[dict[str, Any]]:
        views = {  # with which FSDP1 replaces the parameters, of its flat parameter
            name: value
            for name, value in vars(module).items()
            if isinstance(value, torch.Tensor) and _join_path(path, name) in self.shapes
        }
        own: dict[str, torch.Tensor | None] = {**module._parameters, **views}
        return [self.describe_tensor(tensor, name, path) for name, tensor in own.items()]

    def describe_tensor(self, tensor: torch.Tensor | None, name: str, path: str) -> dict[str, Any]:
        full = _join_path(path, name)
        if tensor is None:
            return {"name": name, "shape": None}
        if id(tensor) in self.names:
            return {"name": name, "same_as": self.names[id(tensor)]}
        self.names[id(tensor)] = full
        shape = self.shapes[full] if full in self.shapes else global_shape(tensor)
        record = {"name": name, "shape": list(shape), "dtype": dtype_name(tensor.dtype)}
        return {**record, "requires_grad": tensor.requires_grad}

    def describe_buffer(self, module: nn.Module, name: str, path: str) -> dict[str, Any]:
        record = self.describe_tensor(module._buffers[name], name, path)
        if name not in module._non_persistent_buffers_set:
            return {**record, "persistent": True}
        return {**record, "persistent": False, "data": _buffer_data(module._buffers[name])}


class _ModuleBuilder:
    """One traversal of a description; records modules and tensors by full name, to resolve `same_as`."""

    def __init__(self, classes: Mapping[str, type]) -> None:
        self.classes = classes
        self.made: dict[str, Any] = {}

    def build_node(self, node: Mapping[str, Any], path: str) -> nn.Module:
        if "same_as" in node:
            shared: nn.Module = self.made[node["same_as"]]
            return shared
        _refuse_method_names(node, self.classes[node["class"]], path)
        module: nn.Module = object.__new__(self.classes[node["class"]])
        nn.Module.__init__(module)
        self.made[path] = module
        # Bypasses __setattr__ and properties: they are code of the class and expect a complete object.
        vars(module).update({key: decode_value(value) for key, value in node["attributes"].items()})
        for record in node["parameters"]:
            module._parameters[record["name"]] = self.build_tensor(record, path, _parameter_on_meta)
        for record in node["buffers"]:
            module._buffers[record["name"]] = self.build_tensor(record, path, _buffer_value)
            if not record["persistent"]:
                module._non_persistent_buffers_set.add(record["name"])
        for name, child in node["children"]:
            module._modules[name] = None if child is None else self.build_node(child, _join_path(path, name))
        return module

    def build_tensor(self, record: Mapping[str, Any], path: str, make: Any) -> Any:
        if "same_as" in record:
            return self.made[record["same_as"]]
        value = None if record["shape"] is None else make(record)
        self.made[_join_path(path, record["name"])] = value
        return value


def tensor_at(module: nn.Module, name: str) -> Any:
    """The attribute of `module` under a dotted name; None if there is none."""
    path, _, key = name.rpartition(".")
    try:
        return getattr(module.get_submodule(path), key)
    except AttributeError:
        return None


def put_at(module: nn.Module, name: str, value: Any) -> None:
    """Put a parameter or buffer under a dotted name."""
    path, _, key = name.rpartition(".")
    setattr(module.get_submodule(path), key, value)


def _is_method(cls: type, name: str) -> bool:
    """Whether the class has a method called `name`, which an attribute would shadow."""
    found = None if name in _CONVERSIONS else inspect.getattr_static(cls, name, None)
    return isinstance(found, (staticmethod, classmethod)) or (callable(found) and not isinstance(found, type))


def _refuse_method_names(node: Mapping[str, Any], cls: type, path: str) -> None:
    """Raise LoadError if a description would replace methods or internals of its class, or has an invalid name."""
    taken = [name for name in node["attributes"] if name in _INTERNAL or _is_method(cls, name)]
    names = [record["name"] for record in (*node["parameters"], *node["buffers"])]
    names += [name for name, _ in node["children"]]
    invalid = [name for name in names if not name or "." in name or name in _INTERNAL or _is_method(cls, name)]
    if taken or invalid:
        wrong = listing([_join_path(path, name) for name in (*taken, *invalid)], ", ")
        raise LoadError(f"{MODULE_NAME}: {wrong}: names of methods, or of no attribute; the checkpoint is damaged")


def _own_hooks(module: nn.Module) -> list[str]:
    """The names of the module's dicts that contain a user's forward hook, which can change its output."""

    def is_of_engine(hook: Any) -> bool:
        return is_engine_code(str(getattr(getattr(hook, "func", hook), "__module__", "")))

    return [name for name in _HOOKS if not all(map(is_of_engine, vars(module)[name].values()))]


def _buffer_data(buffer: torch.Tensor | None) -> str | None:
    """A non-persistent buffer, which no weight file stores, in base64; None if too large or not a plain tensor."""
    if buffer is None or type(buffer) is not torch.Tensor or buffer.is_meta or buffer.is_quantized:
        return None
    if buffer.layout is not torch.strided or buffer.numel() * buffer.element_size() > _MAX_BUFFER_BYTES:
        return None
    flat = buffer.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return base64.b64encode(flat.numpy().tobytes()).decode()


def _parameter_on_meta(record: Mapping[str, Any]) -> nn.Parameter:
    tensor = torch.empty(record["shape"], dtype=dtype_of(record["dtype"]), device="meta")
    return nn.Parameter(tensor, requires_grad=record["requires_grad"])


def _buffer_value(record: Mapping[str, Any]) -> torch.Tensor:
    dtype, data = dtype_of(record["dtype"]), record.get("data")
    if data is None:
        return torch.empty(record["shape"], dtype=dtype, device="meta")
    raw = bytearray(base64.b64decode(data))
    if not raw:  # frombuffer rejects empty buffers
        return torch.empty(record["shape"], dtype=dtype, device="cpu")
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(record["shape"])


def _find_classes(description: Mapping[str, Any], classes: Mapping[str, type]) -> dict[str, type]:
    names = dict.fromkeys(node["class"] for _, node in _walk_nodes(description, ""))
    found = {name: _find_class(name, classes) for name in names}
    problems = [f"{name} ({cls})" for name, cls in found.items() if isinstance(cls, str)]
    if problems:
        raise LoadError(
            f"{MODULE_NAME}: no class to rebuild {', '.join(problems)}; ft_ckpt imports nothing on behalf of a "
            "checkpoint: import the module first, or pass classes={name: Class} or into=module"
        )
    return {name: cls for name, cls in found.items() if not isinstance(cls, str)}


def _find_class(name: str, classes: Mapping[str, type]) -> type | str:
    """The class, or a description of the problem. Reads `__dict__` only: getattr on a lazy module would import."""
    module_name, _, qualname = name.partition(":")
    found: Any = classes.get(name, classes.get(qualname))
    if found is None:
        found = imported_module(module_name)
        if found is None:
            return f"{module_name} is not imported"
        for part in qualname.split("."):
            found = getattr(found, "__dict__", {}).get(part)
    if found is None:
        return f"{module_name} has no such class"
    if not isinstance(found, type) or not issubclass(found, nn.Module):
        return f"{type(found).__name__}, not an nn.Module class"
    return found


def _walk_nodes(node: Mapping[str, Any], path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if "same_as" in node:
        return
    yield path, node
    for name, child in node["children"]:
        if child is not None:
            yield from _walk_nodes(child, _join_path(path, name))


def _warn_opaque(description: Mapping[str, Any]) -> None:
    lost = [_join_path(path, name) for path, node in _walk_nodes(description, "") for name in node["opaque"]]
    lost += [
        _join_path(path, record["name"])
        for path, node in _walk_nodes(description, "")
        for record in node["buffers"]
        if not record["persistent"] and record.get("data") is None and record.get("shape") is not None
    ]
    if lost:
        warn(
            f"{MODULE_NAME}: {listing(lost, ', ')} could not be recorded when saving and are not restored; set them, "
            "or pass into= with a module that has them",
            stacklevel=4,
        )


def _join_path(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
