"""Loads a committed checkpoint as a model, strictly, without running code from it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, overload

import torch
from torch import nn
from typing_extensions import Unpack

from ft_ckpt.checkpoint.checks import SignedBy
from ft_ckpt.model.load.models import load_models
from ft_ckpt.model.load.report import LoadReport, report_load
from ft_ckpt.model.load.request import (
    check_options,
    choose_models,
    open_to_load,
    refuse_damaged,
    refuse_unsigned,
    show_progress,
)
from ft_ckpt.storage.places import Place, open_place

# The type of `into`. If adapters are attached to that module, a PeftModel is returned instead.
ModelType = TypeVar("ModelType", bound=nn.Module)


class LoadArguments(TypedDict, total=False):
    """Keyword arguments of `load_model` for type checkers, without `into` and `with_report`."""

    part: str | None
    base: Any
    classes: Mapping[str, type] | None
    device: str | torch.device | None
    strict: bool
    check_base: bool
    trust_remote_code: bool
    verify: bool
    require_signature: SignedBy | None
    mapped: bool | Literal["auto"]


@overload
def load_model(
    path: str | Path | Place,
    *,
    into: ModelType,
    with_report: Literal[False] = False,
    **arguments: Unpack[LoadArguments],
) -> ModelType | Any: ...


@overload
def load_model(
    path: str | Path | Place,
    *,
    into: ModelType,
    with_report: Literal[True],
    **arguments: Unpack[LoadArguments],
) -> tuple[ModelType | Any, LoadReport]: ...


@overload
def load_model(
    path: str | Path | Place,
    *,
    into: Mapping[str, nn.Module],
    with_report: Literal[False] = False,
    **arguments: Unpack[LoadArguments],
) -> dict[str, Any]: ...


@overload
def load_model(
    path: str | Path | Place,
    *,
    into: Mapping[str, nn.Module],
    with_report: Literal[True],
    **arguments: Unpack[LoadArguments],
) -> tuple[dict[str, Any], LoadReport]: ...


@overload
def load_model(
    path: str | Path | Place,
    *,
    into: None = None,
    with_report: Literal[False] = False,
    **arguments: Unpack[LoadArguments],
) -> Any: ...


@overload
def load_model(
    path: str | Path | Place,
    *,
    into: None = None,
    with_report: Literal[True],
    **arguments: Unpack[LoadArguments],
) -> tuple[Any, LoadReport]: ...


@overload
def load_model(
    path: str | Path | Place,
    *,
    into: nn.Module | Mapping[str, nn.Module] | None = None,
    with_report: bool = False,
    **arguments: Unpack[LoadArguments],
) -> Any: ...


def load_model(
    path: str | Path | Place,
    *,
    part: str | None = None,
    base: Any = None,
    into: nn.Module | Mapping[str, nn.Module] | None = None,
    classes: Mapping[str, type] | None = None,
    device: str | torch.device | None = None,
    strict: bool = True,
    check_base: bool = True,
    trust_remote_code: bool = False,
    verify: bool = False,
    require_signature: SignedBy | None = None,
    mapped: bool | Literal["auto"] = "auto",
    with_report: bool = False,
) -> Any:
    """Load the model at `path`, in eval mode: a Hugging Face model, or a PeftModel on its base.

    With `into`, the tensors of your module are overwritten instead. A checkpoint of several
    attributes gives a dict of models by name. Parameters that they shared are shared again, unless
    both are in your modules.

    Args:
        path: a checkpoint, or the folder of one of its parts.
        part: name of the part to load.
        base: the base model of an adapter, as module, folder or id. The default is the id that it
            was trained on. A base that is a checkpoint of ft_ckpt is compared with its manifest,
            like `path`.
        into: your module, wrapped or not, to load a single part into. Or a mapping of modules by
            part, which gives a dict by part. A part that is no Hugging Face model, such as a value
            head, needs your module, because a checkpoint has its tensors and the name of its class,
            but not its code. The module is filled block by block, so a failed load can leave part
            of the values. The module keeps its mode. A model that transformers converts (fused
            experts) is first loaded separately.
        classes: your own classes of diffusers' models, by name.
        device: the device of the model. Tensors are read to an accelerator directly, in blocks.
        strict: False takes the tensors that fit.
        check_base: False does not compare the sampled weights of the base.
        trust_remote_code: True runs model code in the checkpoint or with the base, as in
            transformers.
        verify: True compares the digests of all files before they are used. The digests of files
            below 1 MB, and all sizes and headers, are always compared.
        require_signature: check the signature of the checkpoint first, see `verify(signed_by=)`.
            That of a base is not checked.
        mapped: True maps all files, False reads all. Files are mapped only if the model keeps
            tensors as they are stored. A weight of a mapped file is copied when it is first
            written, unused weights are not read, and the processes of a machine share one copy.
            "auto" maps files, too. But it reads a large file into memory if most of it is not in
            the page cache, it fits in half of the free memory, and no other process of the launch
            is on this machine. The read bypasses the page cache and overlaps with building the
            model.
        with_report: True returns (model, LoadReport).

    The checkpoint decides the class of the model, which type checkers cannot know. They see Any,
    and with `into` the class of that module. `model: LlamaForCausalLM = ft_ckpt.load_model(path)`
    tells them.

    All files are opened at once, so a save that replaces the checkpoint meanwhile has no effect.

    Raises NotACheckpointError if there is no checkpoint, CorruptError when files differ from the
    manifest or its signature, BaseMismatchError for another base. Raises LoadError naming every
    missing, unexpected or reshaped tensor unless `strict` is False, or the reason why no model can
    be built.
    """
    place = open_place(path)
    options = check_options(
        base=base,
        classes=classes,
        strict=strict,
        check_base=check_base,
        trust_remote_code=trust_remote_code,
        verify=verify,
        mapped=mapped,
        device=device,
    )
    with open_to_load(place, part) as (checkpoint, part_name):
        refuse_unsigned(checkpoint, require_signature)
        requests = choose_models(checkpoint, part_name, into)
        with show_progress(checkpoint, requests, options):
            refuse_damaged(checkpoint, options)
            models, reports = load_models(checkpoint, requests, options)
        report = report_load(checkpoint, part_name, reports, options)

    is_one_model = len(models) == 1 and (part_name is not None or "" in models)
    returns_dict = isinstance(into, Mapping) or not is_one_model
    result: Any = models if returns_dict else next(iter(models.values()))
    return (result, report) if with_report else result
