"""Splits the state of an object into a JSON tree and the tensors in it.

For example, {"step": 3, "mean": tensor} becomes a tree with 3 and a number in the tensor's place,
and a list of one tensor. The tensors are the leaves of the tree.
"""

from dataclasses import replace
from typing import Any

import torch
import xxhash
from torch import Tensor

from ft_ckpt.formats import dtype_name
from ft_ckpt.formats.safetensors import NAMES
from ft_ckpt.formats.trees import Node, encode_node, flatten
from ft_ckpt.ranks.sharding import OwnedSharding, Source
from ft_ckpt.ranks.wrappers import is_distributed, source_of_tensor
from ft_ckpt.runs.optimizers import LEAVES
from ft_ckpt.runs.state.document import Document


def flatten_tree(value: Any, name: str, digest: bool) -> tuple[Document, list[Tensor]]:
    """Return the description of a tree, and its tensors.

    The description has "tree", the encoded nodes, and "leaves": the "shape", the "dtype" and "cut"
    (whether it is a DTensor) of each tensor. With `digest` it also has a "digest" of all this and
    of the tensors' bytes, by which ranks compare their trees. The digest leaves out DTensors.
    Raises SelectionError naming what cannot be stored.
    """
    node, tensors = _flatten_live(value, name)
    leaves = [
        {
            "shape": list(tensor.shape),
            "dtype": dtype_name(tensor.dtype),
            "cut": is_distributed(tensor),
        }
        for tensor in tensors
    ]
    description: Document = {"tree": encode_node(node), "leaves": leaves}
    if digest:
        state = xxhash.xxh3_128(repr(description).encode())
        for tensor in tensors:
            if not is_distributed(tensor):
                content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
                state.update(content.numpy().data)
        description["digest"] = state.hexdigest()

    return description, tensors


def live_tensors(value: Any, name: str) -> list[Tensor]:
    """Return the tensors of a tree, in the order of `flatten_tree`. Raises SelectionError."""
    return _flatten_live(value, name)[1]


def source_of_leaf(name: str, tensor: Tensor) -> Source:
    """Return the source of a tensor in a tree: a DTensor, or a tensor that rank 0 stores."""
    source = replace(source_of_tensor(name, name, tensor), trainable=False)
    if is_distributed(tensor):
        return source
    return replace(source, sharding=OwnedSharding(source.shape, 0))


def _flatten_live(value: Any, name: str) -> tuple[Node, list[Tensor]]:
    """Return the nodes of a tree, and its tensors; a numpy array becomes a tensor."""
    node, leaves = flatten(value, NAMES, name, LEAVES)
    tensors = []
    for leaf in leaves:
        tensor = torch.from_numpy(leaf.data) if leaf.is_array else leaf.data.detach()
        tensors.append(tensor)
    return node, tensors
