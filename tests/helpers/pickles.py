"""Pickles that have side effects if a reader executes them."""

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path


class Call:
    """Is pickled as a call of `function` with `arguments`."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


def malicious(mark: Path) -> dict[str, object]:
    """Return objects that make a file at `mark` when they are unpickled, in several ways."""
    code = f"open({str(mark)!r}, 'w').close()"
    return {
        "system": Call(os.system, f"touch {mark}"),
        "exec": Call(exec, code),
        "eval": Call(eval, f"[{code}]"),
        "getattr": Call(getattr, Call(__import__, "os"), "system"),
        "open": Call(open, str(mark), "w"),
        "nested": {"model": [Call(os.mkdir, str(mark))]},
        "import": Call(__import__, "antigravity"),
    }


def archive(data: bytes, records: dict[str, bytes] | None = None) -> bytes:
    """Return the bytes of a torch file with the pickle `data`, and with these records."""
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
