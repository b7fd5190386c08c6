"""Watches models that are not trained, such as a reference model.

The script makes such a model again at each start, so a checkpoint does not store it. Once its
values have changed, it is registered, and checkpoints store it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import xxhash
from torch import nn

from ft_ckpt.ranks import Ranks, Values
from ft_ckpt.ranks.moving import digests_of
from ft_ckpt.ranks.wrappers import ModelTensors


@dataclass(frozen=True)
class ModelDigest:
    """A digest of this rank's elements of all tensors in a model's state dict.

    Attributes:
        bits: The digest in hexadecimal.
        devices: The types of the devices that computed it. Digests of equal tensors differ between
            types of devices.
        is_whole: Whether this rank has all elements of the model.
    """

    bits: str
    devices: tuple[str, ...]
    is_whole: bool

    @property
    def text(self) -> str:
        """The digest for other runs to compare.

        It is "" if this rank has not all elements, because other runs may divide them otherwise.
        """
        return f"{'+'.join(self.devices)}:{self.bits}" if self.is_whole else ""


@dataclass(frozen=True, eq=False)
class WatchedModel:
    """A model, and the digest of the values with which the script has made it."""

    model: nn.Module
    digest: ModelDigest


def watch_model(model: nn.Module) -> WatchedModel:
    """Record the values of `model`.

    Raises as `ModelTensors.sources` for tensors that cannot be stored.
    """
    return WatchedModel(model, digest_of_model(model))


def digest_of_model(model: nn.Module) -> ModelDigest:
    """Compute the digest of the model's values now. Raises as `ModelTensors.sources`."""
    sources = ModelTensors(model).sources(allow_meta=True)
    local = {}
    is_whole = True
    for name, source in sources.items():
        part = source.local
        if part is not None and not part.is_meta:
            local[name] = part
        else:
            is_whole = False
        if source.sharding.is_sharded:
            is_whole = False

    digests = digests_of(local)
    digests_by_name = [(name, digests.get(name, "")) for name in sources]
    bits = xxhash.xxh3_128_hexdigest(repr(digests_by_name).encode())
    devices = sorted({part.device.type for part in local.values()})
    return ModelDigest(bits, tuple(devices), is_whole)


def changed_models(watched: Mapping[str, WatchedModel], ranks: Ranks) -> list[str]:
    """Return the names of the watched models whose values have changed on at least one rank.

    Collective: call it on every rank. If nothing is watched, the ranks do not communicate.
    """
    if not watched:
        return []

    def changed_on_rank() -> list[str]:
        return [
            name
            for name, record in watched.items()
            if digest_of_model(record.model) != record.digest
        ]

    names, error = ranks.attempt(changed_on_rank)
    agreed = ranks.agree(
        "the models beside the trained one", {"names": names}, error, decide=_all_names
    )
    return list(agreed.result)


def _all_names(values: Values) -> list[str]:
    names: set[str] = set()
    for value in values:
        names.update(value["names"])
    return sorted(names)


def watched_digests(watched: Mapping[str, WatchedModel]) -> dict[str, str]:
    """Return the digests of unchanged models, for the state of a run."""
    return {name: record.digest.text for name, record in watched.items()}


def differing_models(watched: Mapping[str, WatchedModel], saved: Mapping[str, str]) -> list[str]:
    """Return a sentence for each watched model whose values differ from those in a saved run.

    `saved` is the result of `watched_digests` in that run, which had not changed these models.
    """
    differing = []
    for name, digest in saved.items():
        text = watched[name].digest.text if name in watched else ""
        is_comparable = text.partition(":")[0] == digest.partition(":")[0]
        if text and digest and is_comparable and text != digest:
            differing.append(
                f"{name}: has other values than in the saved run, which did not change it"
            )
    return differing
