"""Arguments of `publish` of any type and value: an error where they are given, before anything is
sent.
"""

import math
from collections.abc import Callable
from dataclasses import fields
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_files import EngineFiles
from engine_server import serving

from ft_ckpt import CheckpointSaver, ServerOptions, publish
from ft_ckpt.errors import CheckpointError, ConfigError

URL = "http://127.0.0.1:9"
TOKEN = "sk-VERYSECRET0123"
ODD: dict[str, Any] = {
    "zero": 0,
    "true": True,
    "minus": -1,
    "large": 10**400,
    "half": 0.5,
    "nan": math.nan,
    "inf": math.inf,
    "complex": 1j,
    "decimal": Decimal("NaN"),
    "fraction": Fraction(1, 3),
    "empty": "",
    "null": "a\0b",
    "line": "a\nb",
    "half pair": "\udcff",
    "bytes": b"text",
    "list": [],
    "list of lists": [[1]],
    "dict": {},
    "numbers": {1: 2},
    "nothing in it": {"": ""},
    "tuple": (),
    "set": {1},
    "array": np.ones(3),
    "tensor": torch.ones(3),
    "type": int,
    "object": object(),
    "function": len,
    "url": "s3://bucket/run",
    "nan array": np.float32("nan"),
}
FIELDS = [field.name for field in fields(ServerOptions)]


@pytest.mark.parametrize("name", [*FIELDS, "checkpoint"])
def test_odd_values_are_refused_before_anything_is_sent(name: str, files: EngineFiles) -> None:
    with serving(files.base) as engine:
        for label, value in ODD.items():
            arguments = {"checkpoint": files.adapters[0], "url": engine.url, name: value}
            if is_fitting(name, label):
                continue
            with pytest.raises(CheckpointError) as raised:
                publish(**arguments)
            assert isinstance(raised.value, ConfigError), (label, raised.value)
        assert not engine.requests


def is_fitting(name: str, label: str) -> bool:
    """Whether the argument takes this value, or finds only in the files that nothing has this
    name.
    """
    fitting = {
        "part": {"empty", "null", "line", "half pair", "url"},
        "visible_at": {"dict"},
        "stage": {"line", "half pair"},
        "keep": {"zero", "large"},
        "base": {"empty", "line", "half pair", "url"},
        "headers": {"dict"},
        "timeout_seconds": {"half", "fraction"},
        "delta": {"true"},
        "anchor_every": {"large"},
        "checkpoint": {"line", "half pair", "url"},
    }
    return label in fitting.get(name, set())


SETTINGS: list[Callable[[dict[str, Any]], Any]] = [
    lambda goal: ServerOptions(**goal),
    lambda goal: CheckpointSaver(None, publish=goal),
]


@pytest.mark.parametrize("name", FIELDS)
def test_odd_values_of_the_setting_are_refused_when_the_saver_is_made(name: str) -> None:
    for label, value in ODD.items():
        if is_fitting(name, label):
            continue
        for give in SETTINGS:
            with pytest.raises(ConfigError):
                give({"url": URL, name: value})


def test_all_invalid_arguments_are_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"keep=-1.*timeout_seconds=inf.*delta=1") as raised:
        ServerOptions(url=URL, keep=-1, timeout_seconds=math.inf, delta=1)  # type: ignore[arg-type]  # what is tried
    assert "kind" not in str(raised.value)


@pytest.mark.parametrize(
    "headers", [TOKEN, [TOKEN], {"Authorization": [TOKEN]}, {TOKEN.encode(): 1}]
)
def test_headers_that_are_refused_are_not_shown(headers: Any) -> None:
    with pytest.raises(ConfigError, match="headers: expected names with values") as raised:
        publish("runs/sft", URL, headers=headers)
    assert TOKEN not in str(raised.value)


def test_values_that_fit() -> None:
    options = ServerOptions(
        url=URL, keep=np.int64(3), timeout_seconds=np.float32(2.5), stage="models", headers=None
    )
    assert (options.url, options.keep, options.timeout_seconds) == ((URL,), 3, 2.5)
    assert (options.stage, options.headers) == (Path("models"), {})


def test_options_are_given_in_one_way(files: EngineFiles) -> None:
    with serving(files.base) as engine:
        options = ServerOptions(url=engine.url, name="policy")
        with pytest.raises(ConfigError, match="ServerOptions and keep= were both given"):
            publish(files.adapters[0], options, keep=3)
        assert not engine.requests
        assert publish(files.adapters[0], options).name.startswith("policy@100-")
        assert not publish(files.adapters[0], engine.url, name="policy").servers[0].is_new
