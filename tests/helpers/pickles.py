"""Pickles that have side effects if a reader executes them."""

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path


class Runs:
    """Pickles as a call of `function` with `arguments`."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


def evil(mark: Path) -> dict[str, object]:
    """Ways to make a file appear at `mark` while unpickling."""
    code = f"open({str(mark)!r}, 'w').close()"
    return {
        "system": Runs(os.system, f"touch {mark}"),
        "exec": Runs(exec, code),
        "eval": Runs(eval, f"[{code}]"),
        "getattr": Runs(getattr, Runs(__import__, "os"), "system"),
        "open": Runs(open, str(mark), "w"),
        "nested": {"model": [Runs(os.mkdir, str(mark))]},
        "import": Runs(__import__, "antigravity"),
    }


def archive(data: bytes, records: dict[str, bytes] | None = None) -> bytes:
    """A torch file with this pickle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("archive/data.pkl", data)
        file.writestr("archive/version", "3\n")
        for name, content in (records or {}).items():
            file.writestr(f"archive/{name}", content)
    return buffer.getvalue()


def dump(value: object) -> bytes:
    return pickle.dumps(value, protocol=2)


# Pickles that no pickler writes: each tries to modify an object of the reader, so that later files
# would be misread.
TAMPER = {
    "function": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}X\x04\x00\x00\x00_runNsb.",
    "function_slots": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nN}X\x04\x00\x00\x00_runNs\x86b.",
    "class": b"\x80\x02cargparse\nNamespace\n}X\x08\x00\x00\x00__call__Nsb.",
    "class_slots": b"\x80\x02cargparse\nNamespace\nN}X\x0c\x00\x00\x00__setstate__Ns\x86b.",
    "ordered": b"\x80\x02ccollections\nOrderedDict\nN}X\x06\x00\x00\x00updateNs\x86b.",
}
