"""Converts an adapter to a single rank and scale, which all versions of an engine apply.

Few versions of the engines read rank_pattern, alpha_pattern and use_rslora. The others silently
scale wrongly. The inner matrix of a layer is lora_A, and the outer one is lora_B.
"""

import json
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ft_ckpt.checkpoint import hold_open
from ft_ckpt.checkpoint.manifest import describe_contents
from ft_ckpt.errors import LoadError, SelectionError, listing
from ft_ckpt.extensions.rl.limits.lora import (
    MERGE,
    adapter_findings,
    lora_layers,
    rank_and_scale,
)
from ft_ckpt.extensions.rl.limits.preflight import check_engine
from ft_ckpt.extensions.tools.converting import (
    ConvertReport,
    check_apart,
    convert_options,
    open_source,
    write_converted,
)
from ft_ckpt.formats.files import MemoryFile, TensorFile
from ft_ckpt.model.files import FolderPart, WeightsFolder, adapter_settings
from ft_ckpt.storage.places import Place, open_place

_CONFIG = "adapter_config.json"
_ANY_RANK = 1 << 20


def export(
    adapter: str | Path | Place,
    out: str | Path | Place,
    engine: str = "vllm",
    *,
    overwrite: bool = False,
) -> ConvertReport:
    """Write the LoRA `adapter` to the folder `out` as `engine` ("vllm" or "sglang") applies it.

    A failed call leaves no folder. The result has one rank and one scale. The rank is the largest
    of all layers, and matrices of lower ranks are padded with zeros. The scale is that of most
    layers. In layers of another scale (alpha_pattern, rank_pattern, use_rslora), the outer matrix
    is multiplied by the ratio of the scales. The product has the dtype of the matrix if it is exact
    in it, and float32 otherwise. The report counts the layers that were rounded. Everything else is
    unchanged.

    `adapter` is a PEFT folder, or a checkpoint of ft_ckpt, whose digests are compared. `overwrite`
    is that of `convert`.

    Raises ConfigError for an unknown engine. Raises SelectionError naming each setting and tensor
    that cannot be converted, and the remedy. For files it raises what `convert` raises.
    """
    check_engine(engine)
    source = open_place(adapter)
    target = open_place(out)
    options = convert_options(
        target,
        format="safetensors",
        dtype=None,
        max_shard_size=None,
        verify=True,
        progress=False,
        note=f"converted for {engine} from {source.basename}",
        to_folder=True,
        overwrite=overwrite,
    )
    check_apart([source], options)
    with hold_open(source) as place, closing(open_source(place)) as opened:
        folder, part = _only_adapter(opened, source)
        settings = adapter_settings(Place(folder.store, part.path).folder)
        problems = list(adapter_findings(settings, part.file, _ANY_RANK))
        if problems:
            raise SelectionError(f"{source}: {listing(problems)}")
        tensors, settings, notes = _with_one_scale(part.file, settings)
        manifest = folder.manifest
        if manifest is not None:
            manifest = replace(
                manifest, made_from=(source.basename,), run_id=None, rankings={}, export=True
            )

        converted = WeightsFolder(folder.place, [replace(part, file=tensors)], manifest)
        config_text = json.dumps(settings, indent=2, sort_keys=True).encode()
        config_path = f"{part.path}/{_CONFIG}".lstrip("/")
        options = replace(
            options,
            max_mode=place.mode_at(options.target),
            made_from=(source.basename,),
            replaced={config_path: config_text},
        )
        report = write_converted(converted, place, options)

    return replace(report, notes=(*report.notes, *notes))


def _only_adapter(opened: TensorFile, source: Place) -> tuple[WeightsFolder, FolderPart]:
    """Return the folder and its one adapter.

    Raises LoadError without an adapter, and SelectionError if the folder has other adapters or
    models as well.
    """
    has_adapter = isinstance(opened, WeightsFolder) and any(
        part.kind == "adapter" for part in opened.parts
    )
    if not isinstance(opened, WeightsFolder) or not has_adapter:
        text = describe_contents(source).text
        raise LoadError(f"{source}: {text}; expected a folder with an adapter ({_CONFIG})")
    if len(opened.parts) > 1:
        paths = listing([part.path or "." for part in opened.parts], ", ")
        raise SelectionError(f"{source}: several parts ({paths}); give the folder of one adapter")
    return opened, opened.parts[0]


def _with_one_scale(
    file: TensorFile, settings: Mapping[str, Any]
) -> tuple[MemoryFile, dict[str, Any], list[str]]:
    """Return the tensors and settings with one rank and scale, and notes for the report."""
    layers = {}  # the rank and scale of each layer, by the prefix of its tensors
    for layer, prefix in lora_layers(file).items():
        layers[prefix] = rank_and_scale(settings, layer)
    rank = max(rank for rank, _ in layers.values())

    # A scale of 0 is never chosen. Such a layer gets an outer matrix of zeros.
    scales = Counter(scale for _, scale in layers.values() if scale)
    scale = scales.most_common(1)[0][0] if scales else 1.0
    tensors: dict[str, Tensor] = {}
    rounded = []
    for prefix, (layer_rank, layer_scale) in layers.items():
        ratio = layer_scale / scale
        inner = _matrix(file, f"{prefix}.lora_A.weight")
        outer, is_exact = _multiply(_matrix(file, f"{prefix}.lora_B.weight"), ratio)
        if not is_exact:
            rounded.append(prefix)
            if not torch.isfinite(outer).all():
                raise SelectionError(
                    f"{prefix}.lora_B.weight: not finite in float32, scaled by {ratio:.6g}; {MERGE}"
                )
        missing_ranks = rank - layer_rank
        tensors[f"{prefix}.lora_A.weight"] = pad(inner, (0, 0, 0, missing_ranks))
        tensors[f"{prefix}.lora_B.weight"] = pad(outer, (0, missing_ranks))

    alpha = scale * rank
    new_settings = {
        **settings,
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_rslora": False,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
    }
    notes = [f"rank {rank} and scale {scale:.6g} for all {len(layers)} layers"]
    if rounded:
        notes.append(
            f"{len(rounded)} of {len(layers)} layers: lora_B is scaled and rounded in float32"
        )

    tensors_in_order = {name: tensors[name] for name in file.specs}
    return MemoryFile(tensors_in_order), new_settings, notes


def _multiply(tensor: Tensor, factor: float) -> tuple[Tensor, bool]:
    """Return the product of a tensor and a number, and whether it is exact.

    The product has the dtype of the tensor if it is exact in it, and float32 or wider otherwise.
    """
    product = tensor.double() * factor
    for dtype in (tensor.dtype, torch.promote_types(tensor.dtype, torch.float32)):
        rounded = product.to(dtype)
        if torch.equal(rounded.double(), product):
            return rounded, True
    return rounded, False


def _matrix(file: TensorFile, name: str) -> Tensor:
    return file.read(name).view(file.specs[name].shape)
