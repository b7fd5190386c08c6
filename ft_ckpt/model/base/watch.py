"""Detects changes to the base of a run's adapters.

A checkpoint of adapters alone is resumed on the unchanged base, so a change would be lost.
"""

from contextlib import suppress
from weakref import ref

import torch
from torch import nn

from ft_ckpt.errors import CheckpointError, SelectionError, listing
from ft_ckpt.messages import warn
from ft_ckpt.model.base.samples import MERGED_TOLERANCE, ULPS, are_near, base_samples
from ft_ckpt.model.tensors import refuse_merged
from ft_ckpt.ranks import Ranks, Values
from ft_ckpt.ranks.wrappers import ModelTensors, unwrap


class BaseWatch:
    """Samples the base of one model, and compares it with these samples later."""

    def __init__(self, attribute: str | None = None) -> None:
        """Watch the base in the submodule `attribute`. None is the model itself."""
        self._attribute = attribute
        self._model: ref[nn.Module] | None = None
        self._samples: dict[str, dict[str, float]] = {}
        self._tolerances: dict[str, float] = {}  # relative tolerances, by name of the tensor

    def sample_base(self, model: nn.Module, rank: int) -> None:
        """Sample the base of `model`, unless it was the last one sampled."""
        if self._has_sampled(model):
            return
        with suppress(CheckpointError):  # the model has no tensors yet
            self._samples = base_samples(model, rank, self._attribute)
            sources = ModelTensors(model).sources() if self._samples else {}
            dtypes = {source.name: source.dtype for source in sources.values()}
            self._tolerances = {}
            for name in self._samples:
                rounding = ULPS * torch.finfo(dtypes[name]).eps
                self._tolerances[name] = max(rounding, MERGED_TOLERANCE)
            self._model = ref(unwrap(model))

    def _has_sampled(self, model: nn.Module) -> bool:
        return self._model is not None and self._model() is unwrap(model)

    def changed_layers(self, model: nn.Module, rank: int) -> list[str]:
        """Return the names of base tensors whose samples have changed since `sample_base`."""
        if not self._has_sampled(model) or not self._samples:
            return []
        refuse_merged(unwrap(model))
        current = base_samples(model, rank, self._attribute)
        changed = []
        for name, values in self._samples.items():
            if name not in current:
                continue
            tolerance = self._tolerances[name]
            if not are_near(current[name], values, tolerance, is_adapted=True):
                changed.append(name)
        return changed

    def refuse_changed(self, model: nn.Module, rank: int) -> None:
        """Raise SelectionError if the base has changed. The adapter alone would lose the change."""
        changed = self.changed_layers(model, rank)
        if changed:
            raise SelectionError(
                f"{_changed_text(changed)}: the adapter alone would lose it; save with "
                "adapter_only=False"
            )

    def is_left_out(
        self, model: nn.Module, alone: bool, adapter_only: bool | None, ranks: Ranks
    ) -> bool:
        """Check whether a checkpoint of a run leaves out the base. Call it on every rank.

        `adapter_only` is the user's choice. If it is None, the base is left out if only adapters
        are trained (`alone`). But a base that has changed, as under ReLoRA, is saved with the
        adapters. If `adapter_only` is True, raises SelectionError instead.
        """
        leaves_out = alone if adapter_only is None else adapter_only
        if not leaves_out:
            return False
        changed, error = ranks.attempt(lambda: self.changed_layers(model, ranks.rank))
        names = ranks.agree(
            "the base of save_state()", {"changed": changed}, error, decide=_all_changed
        ).result
        if not names:
            return True
        if adapter_only:
            self.refuse_changed(model, ranks.rank)
            raise SelectionError(
                f"{_changed_text(names)} on other ranks; save with adapter_only=False"
            )

        if ranks.is_main:
            warn(f"{_changed_text(names)}: it is saved with the adapters")
        return False


def _all_changed(values: Values) -> list[str]:
    names: set[str] = set()
    for value in values:
        names.update(value["changed"])
    return sorted(names)


def _changed_text(names: list[str]) -> str:
    return f"{listing(names, ', ')}: the adapters' base has changed since the run began"
