"""Opens a folder of `accelerator.save_state` as a resume point; its pickles are decoded, never executed.

Such a folder numbers objects and parameters instead of naming them. The document holds them under these numbers
("foreign"), and `accelerate_run` matches the numbers with the objects of the run.

Format: `checkpointing.py` and `accelerator.py` of accelerate 1.15; older versions write fewer files.
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ft_ckpt.checkpoint.manifest import MANIFEST_NAME, Manifest, PartRecord
from ft_ckpt.checkpoint.open_checkpoint import OpenCheckpoint
from ft_ckpt.errors import CheckpointError, LoadError, SelectionError, damaged_input, listing
from ft_ckpt.formats.layout import TensorFile, TensorRecord
from ft_ckpt.formats.pytree import encode_value
from ft_ckpt.formats.tensor_file import MemoryFile, RawFile
from ft_ckpt.formats.torch_file import TensorPlace, compare_sums, join_places, load_torch_values, strided_tensor
from ft_ckpt.model.folder import JoinedFile, join_weight_files, weight_files
from ft_ckpt.storage.digests import FileRecord
from ft_ckpt.storage.local_store import LocalStore
from ft_ckpt.training import rng
from ft_ckpt.training.data_position import place_beginning_in
from ft_ckpt.training.optimizers import settings_of
from ft_ckpt.training.state import DOCUMENT_VERSION, FOLDER, Document, ResumePoint, StoredTensors, flatten_tree

ACCELERATE = "accelerate"
MARKER = "random_states_0.pkl"  # in every such folder, and in no other
_NUMBER = r"(?:_(\d+))?"
_NAMES = {  # kinds of files, with the number in the name
    "model": rf"(?:model|pytorch_model){_NUMBER}\.(?:safetensors|bin)(?:\.index\.json)?",
    "optimizer": rf"optimizer{_NUMBER}\.bin",
    "scheduler": rf"scheduler{_NUMBER}\.bin",
    "custom": r"custom_checkpoint_(\d+)\.pkl",
    "loader": rf"dl_state_dict{_NUMBER}\.bin",
    "sampler": rf"sampler{_NUMBER}\.bin",
    "scaler": r"scaler()\.pt",
    "random": r"random_states_(\d+)\.pkl",
}
_OBJECTS = ("scheduler", "custom", "scaler")  # files of one object each
_SHARDED = re.compile(r"pytorch_model(_fsdp)?(_\d+)?(\.bin)?|optimizer(_\d+)?|zero_to_fp32\.py|latest|mp_rank_.*")


def find_accelerate_folder(path: Path) -> Path | None:
    """The folder of `save_state` at `path`: itself, or the `checkpoint_N` in it with the highest number; None without.

    In the folder of a project they are in "checkpoints".
    """
    store = LocalStore(path)
    if store.stat(MANIFEST_NAME) is not None:
        return None
    if store.stat(MARKER) is not None:
        return path
    for place in (store, store.within("checkpoints")):
        numbered = {
            folder.name: re.fullmatch(r"checkpoint_(\d+)", folder.name) for folder in place.list_folder().folders
        }
        found = {int(n[1]): name for name, n in numbered.items() if n and place.within(name).stat(MARKER) is not None}
        if found:
            return place.folder / found[max(found)]
    return None


def is_foreign(manifest: Manifest) -> bool:
    """Whether the manifest describes a folder of Accelerate."""
    return not manifest.created


def open_accelerate_folder(path: Path, stack: ExitStack) -> ResumePoint:
    """Open the folder of `save_state` at `path` until the stack closes.

    Raises LoadError for a folder whose weights are sharded by FSDP or DeepSpeed, or are not there; CorruptError.
    """
    store = LocalStore(path)
    names = _files_by_kind(store)
    if 0 not in names["model"] or 0 not in names["random"]:
        raise LoadError(f"{path}: {_why_unreadable(store)}")
    contents = _Contents(store)
    for kind in _OBJECTS:
        for number, name in names[kind].items():
            contents.add_object(f"{kind}_{number}", name)
    for number, name in names["loader"].items():
        contents.add_loader(f"loader_{number}", name, len(names["random"]))
    for number, name in names["optimizer"].items():
        contents.add_optimizer(f"optimizer_{number}", name)
    for rank in range(len(names["random"])):
        contents.add_rank(rank, names["random"].get(rank, f"random_states_{rank}.pkl"))
    for number, name in names["model"].items():
        weights = weight_files(store, "model")[0] if name.endswith(".index.json") else [name]
        for one in weights:
            if one.endswith(".bin"):
                with closing(store.open(one)) as file:
                    compare_sums(RawFile(file))
        contents.files.append((f"model_{number}/", join_weight_files(store, weights)))
    joined = JoinedFile([*contents.files, ("", contents.memory)], str(path))
    stack.callback(joined.close)
    document = contents.document(names, joined.ties)
    return _make_point(store, document, joined, sorted(name for some in names.values() for name in some.values()))


@dataclass
class _Contents:
    """The contents read so far from the folder in `store`."""

    store: LocalStore
    files: list[tuple[str, TensorFile]] = field(default_factory=list)
    memory: MemoryFile = field(default_factory=MemoryFile)
    objects: dict[str, Document] = field(default_factory=dict)
    optimizers: dict[str, Document] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    ranks: list[Document] = field(default_factory=list)
    last_epoch: int | None = None  # of the first scheduler

    def add_object(self, name: str, file: str) -> None:

        def take_object(raw: RawFile) -> None:
            value = load_torch_values(raw)
            self.objects[name] = self._keep_tree(value, name)
            if name == "scheduler_0" and isinstance(value, dict) and type(value.get("last_epoch")) is int:
                self.last_epoch = value["last_epoch"]

        self._try(name, file, take_object)

    def add_loader(self, name: str, file: str, ranks: int) -> None:
        """Add the state of a stateful loader, unchanged and as a data position."""

        def take_state(raw: RawFile) -> None:
            state = load_torch_values(raw)
            self.objects[name] = self._keep_tree(state, name)
            self.objects[f"{name}/place"] = self._keep_tree(place_beginning_in(state, ranks), f"{name}/place")

        self._try(name, file, take_state)

    def add_optimizer(self, name: str, file: str) -> None:
        """Add an optimizer's state dict, with tensors as their places in the file."""

        def take_state(raw: RawFile) -> None:
            described, tensors = _numbered_optimizer(load_torch_values(raw, places=True))
            self.files.append((f"{name}/", join_places(raw, tensors, ())))
            self.optimizers[name] = described

        self._try(name, file, take_state)

    def add_rank(self, rank: int, file: str) -> None:
        """Add the random state of one rank, and Accelerate's count of batches."""
        trees: Document = {"rng": self._keep_tree({}, "")}
        self.ranks.append(trees)

        def take_states(raw: RawFile) -> None:
            found = load_torch_values(raw)
            with damaged_input(file):
                made = _generators_of(found)
            trees["rng"] = self._keep_tree(made, f"rank-{rank}/rng")
            if type(found.get("step")) is int:
                trees["accumulation"] = self._keep_tree(found["step"], f"rank-{rank}/accumulation")

        self._try(f"random_{rank}", file, take_states)

    def document(self, names: Mapping[str, Mapping[int, str]], ties: Mapping[str, str]) -> Document:
        foreign = {
            "writer": ACCELERATE,
            "files": {kind: {str(number): name for number, name in some.items()} for kind, some in names.items()},
            "objects": self.objects,
            "optimizers": self.optimizers,
            "failed": self.failed,
            "last_epoch": self.last_epoch,
            "ties": dict(ties),
        }
        none = {"step": 0, "epoch": 0, "batch": 0, "samples": 0}
        common = {"version": DOCUMENT_VERSION, "weights": {}, "items": {}, "fingerprint": {}, "history": None}
        return {**common, "ranks": self.ranks, "progress": none, "run_id": "", "foreign": foreign}

    def _keep_tree(self, value: Any, name: str) -> Document:
        facts, tensors = flatten_tree(value, name, False)
        self.memory.tensors |= {f"{name}/{index}": tensor for index, tensor in enumerate(tensors)}
        return {"tree": facts["tree"], "tensors": len(tensors)}

    def _try(self, name: str, file: str, take: Callable[[RawFile], None]) -> None:
        try:
            with damaged_input(file):
                raw = RawFile(self.store.open(file))
                compare_sums(raw)  # now, since ranks read parts of it
                take(raw)
        except (CheckpointError, SelectionError) as error:
            self.failed[name] = str(error)


def _numbered_optimizer(state: Any) -> tuple[Document, dict[str, TensorPlace]]:
    """Groups and state by the numbers of the parameters, and the tensors by "number/key"."""
    tensors: dict[str, TensorPlace] = {}
    entries: Document = {}
    with damaged_input("the state dict of an optimizer"):
        for number, values in state["state"].items():
            entries[str(number)] = known = {}
            for key, value in values.items():
                if isinstance(value, TensorPlace):
                    known[key] = {"shape": list(value.shape), "dtype": value.dtype}
                    tensors[f"{number}/{key}"] = value
                else:
                    known[key] = {"value": encode_value(value)}
        groups: list[Document] = []
        for group in state["param_groups"]:
            plain = {key: _read_tensor(value) for key, value in group.items() if key != "param_names"}
            groups.append({"params": [str(number) for number in group["params"]], "values": settings_of(plain)})
    unknown = [f"group {n}: {key}" for n, one in enumerate(groups) for key, v in one["values"].items() if v is None]
    if unknown:
        raise LoadError(f"{listing(unknown, ', ')}: no plain values")
    # Steps of the optimizer: the highest count of a parameter; None if it keeps no count.
    counts = [float(_read_tensor(values["step"])) for values in state["state"].values() if "step" in values]
    return {"groups": groups, "state": entries, "steps": int(max(counts)) if counts else None}, tensors


def _read_tensor(value: Any) -> Any:
    return strided_tensor(value) if isinstance(value, TensorPlace) else value


def _generators_of(states: Mapping[str, Any]) -> rng.State:
    """The random states of one rank as `rng.restore_generators` takes them."""
    _kind, words, position, has_gauss, gauss = states["numpy_random_seed"]
    found: rng.State = {
        "python": rng.python_state(states["random_state"]),
        "numpy": {
            "bit_generator": "MT19937",
            "state": {"key": words, "pos": int(position)},
            "has_gauss": int(has_gauss),
            "gauss": float(gauss),
        },
        "torch": states["torch_manual_seed"],
    }
    for key, value in states.items():
        device = re.fullmatch(r"torch_(\w+)_manual_seed", key)
        if device is not None and isinstance(value, (list, tuple)):
            found[device[1]] = {str(number): one for number, one in enumerate(value)}
    return found


def _files_by_kind(store: LocalStore) -> dict[str, dict[int, str]]:
    """The files of each kind by number; of weights in two formats safetensors, as Accelerate chooses."""
    found: dict[str, dict[int, str]] = {kind: {} for kind in _NAMES}
    for name in sorted(one.name for one in store.list_folder().objects):
        for kind, pattern in _NAMES.items():
            match = re.fullmatch(pattern, name)
            if match is not None:
                found[kind].setdefault(int(match[1] or 0), name)
    return found


def _why_unreadable(store: LocalStore) -> str:
    listed = store.list_folder()
    names = [one.name for one in listed.objects] + [one.name for one in listed.folders]
    sharded = sorted(name for name in names if _SHARDED.fullmatch(name))
    if sharded:
        return (
            f"{listing(sharded, ', ')}: sharded by FSDP or DeepSpeed, expected model.safetensors or pytorch_model.bin. "
            "Load it with accelerator.load_state on as many ranks as saved it, then call saver.save_state(); weights "
            "alone are read by `ft-ckpt convert`"
        )
    return f"no model.safetensors, pytorch_model.bin or {MARKER} in it; the folder is incomplete, use another one"


def _make_point(store: LocalStore, document: Document, joined: TensorFile, names: list[str]) -> ResumePoint:
    stats = [found for name in names if (found := store.stat(name)) is not None]
    files = tuple(FileRecord(one.name, one.size_bytes, "") for one in stats)
    tensors = tuple(TensorRecord(name, one.shape, one.dtype, MARKER, 0, 0) for name, one in joined.specs.items())
    part = PartRecord(FOLDER, FOLDER, "state", "torch", "", tensors)
    text = repr([(one.name, one.size_bytes, one.version) for one in stats])
    identity = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    held = OpenCheckpoint(store, store, Manifest((part,), files, "full", ""), identity)
    document["run_id"] = identity
    return ResumePoint(held, document, StoredTensors(held, lambda _part: joined))
