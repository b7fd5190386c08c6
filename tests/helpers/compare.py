"""Tensors of saved folders, read with safetensors alone, and the models they should equal."""

import json
from pathlib import Path
from typing import Any

import models
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn


def stored(folder: Path, pattern: str = "*.safetensors") -> dict[str, torch.Tensor]:
    """Read every tensor of the folder's weight files by name; a name in two files is an error."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob(pattern)):
        with safe_open(path, "pt") as file:
            assert (file.metadata() or {}).get("format") == "pt", path
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                assert name not in tensors, f"{name} is in two files"
                tensors[name] = file.get_tensor(name)
    return tensors


def assert_same_tensors(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Assert the same names, and for each the same dtype, shape and bytes."""
    assert theirs
    assert set(ours) == set(theirs), f"names in one only: {sorted(set(ours) ^ set(theirs))}"
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert ours[name].shape == tensor.shape, name
        assert raw(ours[name]) == raw(tensor), f"{name}: bytes differ"


def assert_close_tensors(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Assert the same names and dtypes, and values that differ only by rounding.

    Shapes need only be broadcastable.
    """
    assert theirs
    assert set(ours) == set(theirs), f"names in one only: {sorted(set(ours) ^ set(theirs))}"
    for name, tensor in theirs.items():
        assert torch.allclose(ours[name], tensor, rtol=1e-6, atol=1e-7), (
            f"{name}: {ours[name]} is not {tensor}"
        )


def assert_agree(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Assert that outputs of equal weights agree.

    They are equal but for rounding, which depends on where in memory the weights lie.
    """
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def raw(tensor: torch.Tensor) -> bytes:
    """Return the bytes of the elements in row-major order."""
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def true_model(model: str, folder: Path) -> nn.Module:
    """Build the bare model of that name with the parameters that the wrapped one was saved with."""
    bare = models.build(model, seed=99)  # other values than the worker started from
    truth = load_file(folder / "truth.safetensors")
    tensors: dict[str, torch.Tensor] = dict(bare.named_parameters(remove_duplicate=False))
    tensors.update(bare.named_buffers())
    assert set(truth) == {name for name in tensors if "rotary_emb" not in name}
    with torch.no_grad():
        for name, tensor in truth.items():
            assert tensors[name].shape == tensor.shape, name
            tensors[name].copy_(tensor)
    return bare.eval()


def base_of(state: dict[str, torch.Tensor]) -> nn.Module:
    """Build the bare qwen3 below a PEFT model, from that model's state dict."""
    base_tensors = {}
    for name, tensor in state.items():
        path = name.removeprefix("base_model.model.")
        path = path.replace(".base_layer.", ".").replace(".original_module.", ".")
        base_tensors[path] = tensor
    base = models.build("qwen3", seed=98)
    base.load_state_dict({name: base_tensors[name] for name in base.state_dict()})
    return base


def reference(model: Any, folder: Path, **settings: Any) -> dict[str, torch.Tensor]:
    """Save `model` with `save_pretrained`; return the stored tensors by name."""
    model.save_pretrained(folder, **settings)
    return stored(folder)


@torch.no_grad()
def logits(model: nn.Module, seed: int = 5) -> torch.Tensor:
    return model.eval()(input_ids=models.batch(seed)["input_ids"]).logits


def adapter_config(folder: Path) -> dict[str, Any]:
    """Read the adapter's config with its lists sorted.

    PEFT writes sets, whose order differs between processes.
    """
    config = json.loads((folder / "adapter_config.json").read_text())
    return {
        key: sorted(value) if isinstance(value, list) else value for key, value in config.items()
    }


def files(folder: Path) -> set[str]:
    """Return the paths of all files below the folder, relative to it."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
