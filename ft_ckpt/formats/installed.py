"""Loads and checks a format that an installed distribution brings.

An error of it names the distribution, when the format is loaded. Otherwise a wrong method would be
met in the middle of a save.
"""

from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint
from inspect import Signature, isabstract, signature
from typing import Any

from ft_ckpt.errors import ConfigError
from ft_ckpt.formats.tensor_format import FolderFormat, TensorFormat


def load_installed(entry: EntryPoint, registered: Mapping[str, TensorFormat]) -> TensorFormat:
    """Return the format of an entry point.

    Raises ConfigError if it cannot be imported or made, lacks methods, has methods with other
    arguments, has no name or no suffixes, or has the name of another `registered` format.
    """
    source = "an unknown distribution"
    if entry.dist is not None:
        source = f"{entry.dist.name} {entry.dist.version}"
    what = f"format {entry.name!r} of {source} ({entry.value})"
    try:
        loaded = entry.load()
    except Exception as error:  # of the module's own code, of any kind
        raise ConfigError(
            f"{what}: cannot be imported ({type(error).__name__}: {error}); install what it needs, "
            f"or remove {source}"
        ) from error

    problem = _problem_of_class(loaded)
    if not problem:
        try:
            tensor_format: TensorFormat = loaded() if isinstance(loaded, type) else loaded
        except Exception as error:  # noqa: BLE001 - of its constructor, of any kind
            problem = f"cannot be made without arguments ({type(error).__name__}: {error})"
        else:
            problem = _problem_of_name(tensor_format, entry, registered)
            if not problem:
                return tensor_format

    raise ConfigError(f"{what}: {problem}; install another version of {source}, or remove it")


def _problem_of_class(loaded: Any) -> str:
    """Return what is wrong with the class of a format, or of an instance, else ""."""
    kind = loaded if isinstance(loaded, type) else type(loaded)
    if not issubclass(kind, TensorFormat):
        name = getattr(loaded, "__name__", kind.__name__)
        return f"{name} is not derived from TensorFormat"

    if isabstract(kind):
        return f"lacks {', '.join(sorted(kind.__abstractmethods__))}"
    for method, base in vars(TensorFormat).items():
        own = getattr(kind, method)
        if method.startswith("_") or not callable(base) or own is base:
            continue
        if not callable(own):
            return f"{method} is a {type(own).__name__}, expected a method"
        if not _takes_arguments_of(own, base):
            return f"{method}{_arguments(own)}, expected {method}{_arguments(base)}"

    return ""


def _problem_of_name(
    tensor_format: TensorFormat, entry: EntryPoint, registered: Mapping[str, TensorFormat]
) -> str:
    """Return what is wrong with the name and the suffixes of a format, else ""."""
    name, suffixes = getattr(tensor_format, "name", None), tensor_format.suffixes
    if name != entry.name:
        return f"name={name!r}, expected the name of the entry point"
    taken = registered.get(entry.name)
    if taken is not None and type(taken) is not type(tensor_format):
        kind = type(taken)
        return f"its name is that of {kind.__module__}.{kind.__qualname__}, expected another"
    if not isinstance(suffixes, tuple) or not all(map(_is_suffix, suffixes)):
        return f"suffixes={suffixes!r}, expected a tuple such as ('.{name}',)"
    if not suffixes and not isinstance(tensor_format, FolderFormat):
        return f"no suffixes, expected those of its files, such as ('.{name}',)"
    return ""


def _is_suffix(suffix: object) -> bool:
    return isinstance(suffix, str) and suffix.startswith(".") and len(suffix) > 1


def _takes_arguments_of(own: Callable[..., Any], base: Callable[..., Any]) -> bool:
    """Check whether `own` can be called as `base` is, with its options by position or by name."""
    parameters = signature(base).parameters
    options = {name for name, each in parameters.items() if each.default is not each.empty}
    required = [name for name in parameters if name not in options]
    try:
        signature(own).bind(*parameters)
        signature(own).bind(*required, **dict.fromkeys(options))
    except TypeError:
        return False
    return True


def _arguments(method: Callable[..., Any]) -> str:
    """Return the arguments of a method as text, without types."""
    own = signature(method)
    parameters = [each.replace(annotation=each.empty) for each in own.parameters.values()]
    return str(own.replace(parameters=parameters, return_annotation=Signature.empty))
