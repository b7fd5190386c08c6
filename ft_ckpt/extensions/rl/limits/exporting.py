"""Conversion of an adapter to a single rank and scale, which all versions of an engine apply.

Few versions of the engines read rank_pattern, alpha_pattern and use_rslora; the others silently
scale wrongly.
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

    A failed call leaves no folder. The result has one rank, the largest of all layers, and one
    scale, that of most layers. Matrices of lower ranks are padded with zeros. In layers of another
    scale (alpha_pattern, rank_pattern, use_rslora) the outer matrix is multiplied by the ratio, in
    its dtype if the products are exact in it, else in float32; a note counts the layers that are
    rounded. Everything else is unchanged. `adapter` is a PEFT folder, or a checkpoint of ft_ckpt,
    which is compared with its digests; `overwrite` is that of `convert`.

    Raises ConfigError for an unknown engine, SelectionError naming each setting and tensor without
    an exact conversion and the remedy; for files as `convert` does.
    """
    check_engine(engine)
    source, goal = open_place(adapter), open_place(out)
    options = convert_options(
        goal,
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
        plain, settings, notes = _plain_adapter(part.file, settings)
        manifest = folder.manifest
        if manifest is not None:
            manifest = replace(
                manifest, made_from=(source.basename,), run_id=None, rankings={}, export=True
            )
        converted = WeightsFolder(folder.place, [replace(part, file=plain)], manifest)
        text = json.dumps(settings, indent=2, sort_keys=True).encode()
        config = f"{part.path}/{_CONFIG}".lstrip("/")
        options = replace(
            options,
            max_mode=place.mode_at(options.target),
            made_from=(source.basename,),
            replaced={config: text},
        )
        report = write_converted(converted, place, options)
    return replace(report, notes=(*report.notes, *notes))


def _only_adapter(opened: TensorFile, source: Place) -> tuple[WeightsFolder, FolderPart]:
    parts = opened.parts if isinstance(opened, WeightsFolder) else ()
    if not isinstance(opened, WeightsFolder) or "adapter" not in [part.kind for part in parts]:
        text = describe_contents(source).text
        raise LoadError(f"{source}: {text}; expected a folder with an adapter ({_CONFIG})")
    if len(opened.parts) > 1:
        paths = listing([part.path or "." for part in opened.parts], ", ")
        raise SelectionError(f"{source}: several parts ({paths}); give the folder of one adapter")
    return opened, opened.parts[0]


def _plain_adapter(
    file: TensorFile, settings: Mapping[str, Any]
) -> tuple[MemoryFile, dict[str, Any], list[str]]:
    """Convert the tensors and settings of an adapter; return them with notes."""
    layers = {}
    for layer, head in lora_layers(file).items():
        layers[head] = rank_and_scale(settings, layer)
    rank = max(rank for rank, _ in layers.values())
    # a layer scaled by 0 gets a matrix of zeros
    scales = Counter(scale for _, scale in layers.values() if scale)
    scale = scales.most_common(1)[0][0] if scales else 1.0
    tensors: dict[str, Tensor] = {}
    rounded = []
    for head, (layer_rank, layer_scale) in layers.items():
        inner = _matrix(file, f"{head}.lora_A.weight")
        outer, is_exact = _scaled(_matrix(file, f"{head}.lora_B.weight"), layer_scale / scale)
        if not is_exact:
            rounded.append(head)
            if not torch.isfinite(outer).all():
                raise SelectionError(
                    f"{head}.lora_B.weight: not finite in float32, scaled by "
                    f"{layer_scale / scale:.6g}; {MERGE}"
                )
        missing_ranks = rank - layer_rank
        tensors[f"{head}.lora_A.weight"] = pad(inner, (0, 0, 0, missing_ranks))
        tensors[f"{head}.lora_B.weight"] = pad(outer, (0, missing_ranks))
    alpha = scale * rank
    plain_settings = {
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
    in_order = {name: tensors[name] for name in file.specs}
    return MemoryFile(in_order), plain_settings, notes


def _scaled(tensor: Tensor, factor: float) -> tuple[Tensor, bool]:
    """Return the product in the tensor's dtype if that is exact, else in float32.

    The second result tells whether the product is exact.
    """
    product = tensor.double() * factor
    for dtype in (tensor.dtype, torch.promote_types(tensor.dtype, torch.float32)):
        scaled = product.to(dtype)
        if torch.equal(scaled.double(), product):
            return scaled, True
    return scaled, False


def _matrix(file: TensorFile, name: str) -> Tensor:
    return file.read(name).view(file.specs[name].shape)
