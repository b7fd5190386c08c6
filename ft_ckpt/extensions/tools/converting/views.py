"""Makes views of an open file of tensors: renamed, cast, without ties, or with fewer tensors.

A view reads from the file, and copies nothing.
"""

from collections.abc import Sequence

from ft_ckpt.errors import ConfigError
from ft_ckpt.extensions.tools.converting.rename_rules import Names, rename_tensors
from ft_ckpt.formats.files import TensorFile, TensorView
from ft_ckpt.messages import expected_one_of

_DTYPES = ("float64", "float32", "bfloat16", "float16")
FLOAT_DTYPES = (
    *_DTYPES,
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)


def translate_file(file: TensorFile, names: Names, dtype: str | None) -> TensorView:
    """Rename the tensors of `file`, and cast floating-point ones to `dtype` if it is not None.

    `names` are rules as `read_map` returns them. Raises ConfigError for an unknown dtype, and
    SelectionError if two tensors would get one name.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise ConfigError(f"dtype={dtype!r}: {expected_one_of(dtype, _DTYPES)}")
    new_names = rename_tensors([*file.specs, *file.ties], names)
    dtypes: dict[str, str] = {}
    for name, spec in file.specs.items():
        if dtype is not None and spec.dtype in FLOAT_DTYPES:
            dtypes[new_names[name]] = dtype

    return TensorView.of_file(
        file,
        {new_names[name]: name for name in file.specs},
        dtypes=dtypes,
        ties={new_names[alias]: new_names[name] for alias, name in file.ties.items()},
        metadata=file.metadata,
        skipped=file.skipped,
    )


def untie_file(file: TensorFile) -> TensorView:
    """Return `file` with each name of a tied tensor as a tensor of its own.

    Formats without ties need such a file.
    """
    names = {name: name for name in file.specs}
    return TensorView.of_file(file, {**names, **file.ties}, metadata=file.metadata)


def select_tensors(file: TensorView, names: Sequence[str]) -> TensorView:
    """Return the tensors `names` of a file and the names tied to them, for one weight file."""
    selected = {name: name for name in names}
    ties = {alias: name for alias, name in file.ties.items() if name in selected}
    return TensorView.of_file(file, selected, ties=ties, metadata=file.metadata)
