"""Compares the digests that an engine reports with those of a checkpoint's tensors.

Engines store tensors in another form than files. They fuse q, k and v, and also gate and up. Each
rank of tensor parallelism has its rows or columns. The vocabulary is padded, and all tensors have
the engine's dtype. The rules here compute the same form for dense decoders: for vLLM's
`QKVParallelLinear`, `MergedColumnParallelLinear`, `RowParallelLinear` and `VocabParallelEmbedding`,
which SGLang shares. Parameters without a rule are counted, but prove nothing.

On some processors an engine packs linear layers for its kernels. It then reports the digests of the
packed layers, or digests of no bytes (vLLM 0.32 with AVX-512 BF16). `packed_layers` finds out which
layers these are while the server holds weights whose files are known.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ft_ckpt.errors import listing
from ft_ckpt.formats.files import TensorFile

KNOWN_MODELS = frozenset(
    {
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "olmo",
        "olmo2",
        "olmo3",
        "gemma",
        "gemma2",
        "smollm3",
        "granite",
    }
)
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# Layers that are divided between ranks by the rows of the stored matrix, fused or not.
_COLUMN_PARALLEL = re.compile(r"\.(q|k|v|gate|up)_proj\.")
# Layers that are divided between ranks by the columns of the stored matrix.
_ROW_PARALLEL = re.compile(r"\.(o_proj|down_proj)\.weight$")
_LINEAR = re.compile(r"\.(q|k|v|qkv|o|gate|up|gate_up|down)_proj\.weight$")
_VOCABULARY = re.compile(r"(^|\.)(embed_tokens|lm_head)\.weight$")
_RANK = re.compile(r"^(?:[a-z]+\d+:)+")
_VOCABULARY_PADDING = 64
_SHA256_DIGITS = 64
_NO_BYTES = hashlib.sha256().hexdigest()
_THREADS = 4  # each thread has one parameter in memory
_DTYPES = ("bfloat16", "float16", "float32")  # tried after the dtype in the file


@dataclass(frozen=True)
class DigestComparison:
    """How the parameters of one server compare with a checkpoint.

    Attributes:
        equal: The names of parameters whose digest is that of the files.
        different: The digests by the files of each other parameter with a rule, by name.
        without_rule: The names of parameters without a rule, or with a digest that is not SHA-256.
        unused: Stored tensors that are in no parameter, because the engine has dropped them.
    """

    equal: tuple[str, ...]
    different: Mapping[str, frozenset[str]]
    without_rule: tuple[str, ...]
    unused: tuple[str, ...]

    @property
    def total(self) -> int:
        return len(self.equal) + len(self.different) + len(self.without_rule)

    def __str__(self) -> str:
        return f"{self.counts}{self.dropped}"

    @property
    def counts(self) -> str:
        """How many parameters are equal, in words."""
        return f"{len(self.equal)} of {self.total} parameters equal to the files"

    @property
    def dropped(self) -> str:
        """The unused tensors in words, or "" if there are none."""
        if not self.unused:
            return ""
        return f"; {listing(list(self.unused), ', ', 3)}: in none of them"


@dataclass(frozen=True)
class PackedLayer:
    """A linear layer that a server keeps in another layout than files, with known weights.

    Attributes:
        reported: The digest that the server reports for the weights.
        in_files: The digests of the same weights in the files, one for each dtype.
    """

    reported: str
    in_files: frozenset[str]

    def has_changed(self, in_files: frozenset[str]) -> bool:
        """Check whether other files, with the digests `in_files`, have other weights."""
        return in_files.isdisjoint(self.in_files)

    def fits(self, reported: str, in_files: frozenset[str]) -> bool:
        """Check whether a new digest `reported` is possible for files with the digests `in_files`.

        The digest must change if the weights in the files change, and only then.
        """
        if self.has_changed(in_files):
            return reported != self.reported
        # If the digests are equal in some dtypes only, either is possible.
        return reported == self.reported or in_files != self.in_files


def packed_layers(
    reported: Mapping[str, str], file: TensorFile, config: Mapping[str, Any]
) -> dict[str, PackedLayer]:
    """Return the linear layers, by name, that a server keeps in another layout than files.

    `reported` are the digests of the server while it holds the weights in `file`. If any other
    parameter of the server differs from the files, the server does not hold these weights, and no
    layer is returned.
    """
    linear_names = [name for name in reported if _LINEAR.search(_bare(name))]

    # The first layer on all ranks is compared first. If it is not packed, no layer is.
    first_layer = {}
    for name in linear_names:
        if _bare(name) == _bare(linear_names[0]):
            first_layer[name] = reported[name]

    if not compare_digests(first_layer, file, config).different:
        return {}
    comparison = compare_digests(reported, file, config)
    if not comparison.equal or not comparison.different.keys() <= set(linear_names):
        return {}
    return {
        name: PackedLayer(reported[name], in_files)
        for name, in_files in comparison.different.items()
    }


def compare_digests(
    reported: Mapping[str, str], file: TensorFile, config: Mapping[str, Any]
) -> DigestComparison:
    """Compare the SHA-256 digests that an engine reports with those of the tensors in `file`.

    `reported` has digests by name of the parameter with its ranks as prefix, such as
    "dp0:pp0:pcp0:tp1:model.norm.weight". `config` is the model's config.json. The engine may have
    cast a parameter, so it is equal if it is equal in the file's dtype, bfloat16, float16 or
    float32.
    """
    ranks = 1 + max((_tensor_rank(name) for name in reported), default=0)
    stored = _StoredModel(file, config, ranks)
    unused = {name for name in file.specs if not name.endswith("rotary_emb.inv_freq")}
    if config.get("tie_word_embeddings"):
        unused.discard("lm_head.weight")
    sources_by_name: dict[str, list[str]] = {}
    without_rule = []
    for name, digest in reported.items():
        sources = stored.sources(_bare(name))
        unused.difference_update(stored.ties.get(source, source) for source in sources)
        if sources and len(digest) == _SHA256_DIGITS:
            sources_by_name[name] = sources
        else:
            without_rule.append(name)

    def digests_in_files(name: str, sources: Sequence[str]) -> frozenset[str]:
        """Return the digests that the parameter may have.

        The computation ends at the digest that the parameter has.
        """
        digests = set()
        for digest in stored.digests(_bare(name), sources, _tensor_rank(name)):
            digests.add(digest)
            if digest == reported[name]:
                break
        return frozenset(digests)

    # Several threads compute the digests, because the server is paused until they are compared.
    with ThreadPoolExecutor(_THREADS) as pool:
        in_files = list(pool.map(digests_in_files, sources_by_name, sources_by_name.values()))
    equal = []
    different = {}
    for name, digests in zip(sources_by_name, in_files, strict=True):
        if reported[name] in digests:
            equal.append(name)
        else:
            different[name] = digests

    return DigestComparison(tuple(equal), different, tuple(without_rule), tuple(sorted(unused)))


def is_unreported(digest: str) -> bool:
    """Check whether the digest is that of no bytes, because the parameter is kept elsewhere."""
    return digest == _NO_BYTES


def is_known(config: Mapping[str, Any]) -> bool:
    """Check whether engines follow these rules for a model with this config.json.

    The model must be of a known type and not quantised.
    """
    return config.get("model_type") in KNOWN_MODELS and not config.get("quantization_config")


def _bare(name: str) -> str:
    """Return the name of a parameter without ranks, and without the wrapper of adapted layers."""
    return _RANK.sub("", name).replace(".base_layer.", ".")


def _tensor_rank(name: str) -> int:
    match = re.search(r"(?:^|:)tp(\d+):", name)
    return int(match[1]) if match else 0


class _StoredModel:
    """The tensors of a checkpoint in the form of an engine with `ranks` of tensor parallelism."""

    def __init__(self, file: TensorFile, config: Mapping[str, Any], ranks: int) -> None:
        self.file, self.ranks = file, ranks
        heads = int(config.get("num_attention_heads") or 1)
        self.key_heads = int(config.get("num_key_value_heads") or heads)
        self.ties = file.ties

    def sources(self, name: str) -> list[str]:
        """Return the names of the stored tensors that make up the parameter `name`, in order.

        Returns [] if a tensor is missing.
        """
        names = [name]
        for fused, parts in _FUSED.items():
            if f".{fused}." in name and not self._has(name):
                names = [name.replace(f".{fused}.", f".{part}.") for part in parts]
        if name == "lm_head.weight" and not self._has(name):
            # The head is tied to the embedding, and stored once.
            names = [stored for stored in self.file.specs if _VOCABULARY.search(stored)][:1]
        return names if names and all(map(self._has, names)) else []

    def digests(self, name: str, sources: Sequence[str], rank: int) -> Iterator[str]:
        """Yield the digests that the parameter may have on a rank, one for each dtype.

        There are two for each dtype if the vocabulary may be padded or not.
        """
        stored_dtype = self.file.specs[self.ties.get(sources[0], sources[0])].dtype
        for dtype_name in dict.fromkeys((stored_dtype, *_DTYPES)):
            dtype = getattr(torch, dtype_name)
            if len(sources) > 1:
                rows = [self._rows(self._read(source, dtype), rank, source) for source in sources]
                yield _sha256(torch.cat(rows))  # a fused parameter
                continue

            tensor = self._read(sources[0], dtype)
            if _VOCABULARY.search(name):
                padding = -tensor.shape[0] % _VOCABULARY_PADDING
                for padded_rows in dict.fromkeys((0, padding)):
                    zeros = tensor.new_zeros(padded_rows, *tensor.shape[1:])
                    yield _sha256(self._part(torch.cat([tensor, zeros]), rank, 0))
            elif _ROW_PARALLEL.search(name):
                yield _sha256(self._part(tensor, rank, 1))
            elif _COLUMN_PARALLEL.search(name):
                yield _sha256(self._rows(tensor, rank, name))
            else:
                yield _sha256(tensor)

    def _has(self, name: str) -> bool:
        return name in self.file.specs or name in self.ties

    def _read(self, name: str, dtype: torch.dtype) -> Tensor:
        stored = self.ties.get(name, name)
        return self.file.read(stored).view(self.file.specs[stored].shape).to(dtype)

    def _rows(self, tensor: Tensor, rank: int, source: str) -> Tensor:
        """Return the rows of a rank.

        If there are fewer key and value heads than ranks, several ranks have the same head.
        """
        if re.search(r"\.[kv]_proj\.", source) and self.key_heads < self.ranks:
            return tensor.chunk(self.key_heads)[rank * self.key_heads // self.ranks]
        return self._part(tensor, rank, 0)

    def _part(self, tensor: Tensor, rank: int, dimension: int) -> Tensor:
        """Return the part of a rank, or the tensor if it cannot be divided."""
        if self.ranks == 1 or tensor.shape[dimension] % self.ranks:
            return tensor
        return tensor.chunk(self.ranks, dimension)[rank]


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()
