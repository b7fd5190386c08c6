"""Opens a folder of `accelerator.save_state` as a resume point; its pickles are decoded, never executed.

Such a folder numbers objects and parameters instead of naming them. `open_accelerate_folder` makes a document of them
under these numbers ("foreign"), on rank 0 and on ranks that see the folder; `fit_point` matches the numbers with the
items of the run. Models, optimizers, schedulers and registered objects are matched by the order in which they were
prepared, parameters of an optimizer by their order in its groups; shapes are compared.

Format: `checkpointing.py` and `accelerator.py` of accelerate 1.15; older versions write fewer files.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ft_ckpt.checkpoint.contents import ACCELERATE_MARKER
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME, Manifest, PartRecord
from ft_ckpt.checkpoint.open_checkpoint import OpenCheckpoint
from ft_ckpt.distributed.source import Source
from ft_ckpt.errors import CheckpointError, LoadError, SelectionError, damaged_input, listing
from ft_ckpt.formats.dtypes import dtype_name
from ft_ckpt.formats.layout import TensorFile, TensorRecord
from ft_ckpt.formats.pytree import encode_value
from ft_ckpt.formats.tensor_file import MemoryFile, RawFile, RenamedFile
from ft_ckpt.formats.torch_file import TorchFile, compare_sums, load_torch_values
from ft_ckpt.model.folder import JoinedFile, join_weight_files, weight_files
from ft_ckpt.storage.digests import FileRecord
from ft_ckpt.storage.local_store import LocalStore
from ft_ckpt.training import optimizers, rng, zero_optimizer
from ft_ckpt.training.data_position import describe_data, place_beginning_in
from ft_ckpt.training.items import Item, bare_identity, labelled_sources, model_sources, tied_names
from ft_ckpt.training.optimizers import Description, settings_of
from ft_ckpt.training.restore import LiveRun, Restored
from ft_ckpt.training.state import DOCUMENT_VERSION, FOLDER, Document, ResumePoint, StoredTensors, flatten_tree

ACCELERATE = "accelerate"
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
_MEMBERS = "param_names"  # of a group, if the optimizer was made of named parameters
_OBJECTS = ("scheduler", "custom", "scaler")  # files of one object each
_SHARDED = re.compile(r"pytorch_model(_fsdp)?(_\d+)?(\.bin)?|optimizer(_\d+)?|zero_to_fp32\.py|latest|mp_rank_.*")


def find_accelerate_folder(path: Path) -> Path | None:
    """The folder of `save_state` at `path`: itself, or the `checkpoint_N` in it with the highest number; None without.

    In a project folder it is below "checkpoints".
    """
    store = LocalStore(path)
    if store.stat(MANIFEST_NAME) is not None:
        return None
    if store.stat(ACCELERATE_MARKER) is not None:
        return path
    for place in (store, store.within("checkpoints")):
        by_number: dict[int, str] = {}
        for folder in place.list_folder().folders:
            match = re.fullmatch(r"checkpoint_(\d+)", folder.name)
            if match and place.within(folder.name).stat(ACCELERATE_MARKER) is not None:
                by_number[int(match[1])] = folder.name
        if by_number:
            return place.folder / by_number[max(by_number)]
    return None


def is_foreign(manifest: Manifest) -> bool:
    """Whether the manifest describes a folder of Accelerate."""
    return not manifest.created


def open_accelerate_folder(path: Path, stack: ExitStack) -> ResumePoint:
    """Open the folder of `save_state` at `path` until the stack closes.

    Raises LoadError for a folder whose weights are sharded by FSDP or DeepSpeed, or missing; CorruptError for damage.
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
        for file_name in weights:
            if file_name.endswith(".bin"):
                with closing(store.open(file_name)) as file:
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
            described, tensors = _numbered_optimizer(load_torch_values(raw))
            self.files.append((f"{name}/", TorchFile(raw, tensors)))
            self.optimizers[name] = described

        self._try(name, file, take_state)

    def add_rank(self, rank: int, file: str) -> None:
        """Add the random state of one rank, and Accelerate's count of batches."""
        trees: Document = {"rng": self._keep_tree({}, "")}
        self.ranks.append(trees)

        def take_states(raw: RawFile) -> None:
            states = load_torch_values(raw)
            with damaged_input(file):
                generators = _generators_of(states)
            trees["rng"] = self._keep_tree(generators, f"rank-{rank}/rng")
            if type(states.get("step")) is int:
                trees["accumulation"] = self._keep_tree(states["step"], f"rank-{rank}/accumulation")

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
                compare_sums(raw)  # now, because ranks later read only parts of it
                take(raw)
        except (CheckpointError, SelectionError) as error:
            self.failed[name] = str(error)


def _numbered_optimizer(state: Any) -> tuple[Document, dict[str, torch.Tensor]]:
    """Groups and state by the numbers of the parameters, and the tensors by "number/key"."""
    tensors: dict[str, torch.Tensor] = {}
    entries: Document = {}
    with damaged_input("the state dict of an optimizer"):
        for number, values in state["state"].items():
            entries[str(number)] = known = {}
            for key, value in values.items():
                if isinstance(value, torch.Tensor):
                    known[key] = {"shape": list(value.shape), "dtype": dtype_name(value.dtype)}
                    tensors[f"{number}/{key}"] = value
                else:
                    known[key] = {"value": encode_value(value)}
        groups: list[Document] = []
        for group in state["param_groups"]:
            plain = {key: value for key, value in group.items() if key != _MEMBERS}
            names = group.get(_MEMBERS)
            described = {"params": [str(number) for number in group["params"]], "values": settings_of(plain)}
            groups.append({**described, _MEMBERS: None if names is None else [str(name) for name in names]})
    # Steps of the optimizer: the highest count of a parameter; None if it keeps no count.
    counts = [float(values["step"]) for values in state["state"].values() if "step" in values]
    return {"groups": groups, "state": entries, "steps": int(max(counts)) if counts else None}, tensors


def _generators_of(states: Mapping[str, Any]) -> rng.State:
    """The random states of one rank as `rng.restore_generators` takes them."""
    generators = rng.plain_states(states["random_state"], states["numpy_random_seed"], states["torch_manual_seed"])
    for key, value in states.items():
        device = re.fullmatch(r"torch_(\w+)_manual_seed", key)
        if device is not None and isinstance(value, (list, tuple)):
            generators[device[1]] = {str(number): state for number, state in enumerate(value)}
    return generators


def _files_by_kind(store: LocalStore) -> dict[str, dict[int, str]]:
    """The files of each kind by number; if weights are in two formats, those in safetensors, as in Accelerate."""
    files: dict[str, dict[int, str]] = {kind: {} for kind in _NAMES}
    for name in sorted(stored.name for stored in store.list_folder().objects):
        for kind, pattern in _NAMES.items():
            match = re.fullmatch(pattern, name)
            if match is not None:
                files[kind].setdefault(int(match[1] or 0), name)
    return files


def _why_unreadable(store: LocalStore) -> str:
    listed = store.list_folder()
    names = [entry.name for entry in listed.objects] + [entry.name for entry in listed.folders]
    sharded = sorted(name for name in names if _SHARDED.fullmatch(name))
    if sharded:
        return (
            f"{listing(sharded, ', ')}: sharded by FSDP or DeepSpeed, expected model.safetensors or pytorch_model.bin. "
            "Load it with accelerator.load_state on as many ranks as saved it, then call saver.save_state(); weights "
            "alone are read by `ft-ckpt convert`"
        )
    return (
        f"no model.safetensors, pytorch_model.bin or {ACCELERATE_MARKER} in it; the folder is incomplete, use "
        "another one"
    )


def _make_point(store: LocalStore, document: Document, joined: TensorFile, names: list[str]) -> ResumePoint:
    stats = [stat for name in names if (stat := store.stat(name)) is not None]
    files = tuple(FileRecord(item.name, item.size_bytes, "") for item in stats)
    tensors = tuple(
        TensorRecord(name, item.shape, item.dtype, ACCELERATE_MARKER, 0, 0) for name, item in joined.specs.items()
    )
    part = PartRecord(FOLDER, FOLDER, "state", "torch", "", tensors)
    text = repr([(item.name, item.size_bytes, item.version) for item in stats])
    identity = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    held = OpenCheckpoint(store, store, Manifest((part,), files, "full", ""), identity)
    document["run_id"] = identity
    return ResumePoint(held, document, StoredTensors(held, lambda _part: joined))


_LISTS = {"model": "_models", "optimizer": "_optimizers", "scheduler": "_schedulers", "custom": "_custom_objects"}
_KINDS = {
    "optimizer": torch.optim.Optimizer,
    "scheduler": torch.optim.lr_scheduler.LRScheduler,
    "scaler": torch.amp.GradScaler,
}
_NO_PLACE = (
    "save_state stores no data position, except of stateful loaders; make the switch at the end of a pass, or skip "
    "the batches that were done as after load_state"
)


def fit_point(
    point: ResumePoint, live: LiveRun
) -> tuple[ResumePoint, list[Item], tuple[Restored, ...], tuple[str, ...]]:
    """`point` under the names of the run; the items to restore; outcomes known in advance; and notes for the report.

    An ft_ckpt checkpoint is returned unchanged.
    """
    if "foreign" not in point.document:
        return point, list(live.items), (), ()
    fit = _Fitting(point.document["foreign"], live, _names_in_order(live, point.document["foreign"]))
    fit.fit_models(point.tensors)
    fit.fit_optimizers()
    for kind in ("scheduler", "scaler", "custom"):
        for number, name in fit.items_of(kind):
            fit.take_tree(name, f"{kind}_{number}")
    ranks = fit.fit_data(point.document["ranks"])
    fit.judge_rank(point)
    step, notes = _steps_done(fit.foreign, live.accelerator, len(ranks))
    document = {**point.document, "weights": fit.weights, "items": fit.entries, "ranks": ranks}
    document["progress"] = {**document["progress"], "step": step}
    renamed = replace(point, document=document, tensors=_renamed_tensors(point, fit.names))
    judged = {outcome.name for outcome in fit.outcomes}
    items = [item for item in (*live.items, *fit.loaders) if item.name not in judged]
    return renamed, items, tuple(fit.outcomes), (*notes, *fit.notes)


@dataclass
class _Fitting:
    """The matches of a folder's contents with the items of the run, so far."""

    foreign: Document
    run: LiveRun
    order: Mapping[str, Sequence[str | None]]  # items of the run by their kind and number; "" is the model
    weights: Document = field(default_factory=dict)
    entries: Document = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)  # of tensors: the run's -> the folder's
    outcomes: list[Restored] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    loaders: list[Item] = field(default_factory=list)

    def fit_models(self, stored: StoredTensors) -> None:
        """The weights of all models, by name."""
        for number, item in self.items_of("model"):
            prefix = f"model_{number}/"
            ties = {n.removeprefix(prefix): old for n, old in self.foreign["ties"].items() if n.startswith(prefix)}
            places = {name: prefix + name for name in stored.state_names(prefix)} | ties
            places = _live_names(places, model_sources(self.run.found, item))
            if item:
                self.entries[item] = {"model": True}
                self.names |= {f"{item}/{name}": old for name, old in places.items()}
            else:
                self.weights = {name: [FOLDER, old] for name, old in places.items()}

    def fit_optimizers(self) -> None:
        """The state of the optimizers, by the names of the parameters."""
        by_name, labels = {item.name: item for item in self.run.items}, labelled_sources(self.run.found)
        for number, name in self.items_of("optimizer"):
            key = f"optimizer_{number}"
            try:
                description, owners = _fit_optimizer(by_name[name], self.foreign["optimizers"][key], labels)
            except CheckpointError as error:
                self.outcomes.append(Restored(name, "failed", str(error)))
                continue
            self.entries[name] = {"optimizer": description}
            for owner, number_there in owners.items():
                for entry in description["state"].get(owner, {}):
                    old = f"{key}/{number_there}/{entry}"
                    self.names[f"{name}/{owner}/{entry}"] = self.foreign["ties"].get(old, old)

    def fit_data(self, ranks: Sequence[Document]) -> list[Document]:
        """Match data positions, which only stateful loaders store; returns the trees of all `ranks` with them."""
        loaders = getattr(self.run.accelerator, "_dataloaders", ())
        places: Document = {}
        for number, loader in enumerate(loaders):
            name, key = f"data_{number}" if number else "data", f"loader_{number}"
            problem = self._data_problem(key, loader, len(ranks))
            if problem is not None:
                self.outcomes.append(Restored(name, *problem))
                continue
            self.loaders.append(Item(name, "object", loader))
            self.take_tree(name, key)
            place = self.foreign["objects"][f"{key}/place"]
            about = flatten_tree(describe_data(loader), "about", False)[0]["tree"]
            places[f"loader-{len(places)}"] = {**place, "tree": {**place["tree"], "about": about}}
            for rank in range(len(ranks)):
                old = (f"{key}/place/{index}" for index in range(place["tensors"]))
                self.names |= {f"rank-{rank}/loader-{len(places) - 1}/{index}": one for index, one in enumerate(old)}
        files = self.foreign["files"]
        further = [file for number, file in files["loader"].items() if int(number) >= len(loaders)]
        self.outcomes += [Restored(file, "absent", "in the folder, not in this run") for file in further]
        self.outcomes += [
            Restored(file, "absent", "a pickled sampler is not read") for file in files["sampler"].values()
        ]
        self.notes.append("passes, batches and samples are counted from here")
        return [{**trees, **places} for trees in ranks]

    def _data_problem(self, key: str, loader: Any, saved: int) -> tuple[str, str] | None:
        """The status and detail of a loader whose position cannot be restored; None if it can."""
        if key in self.foreign["failed"]:
            return "failed", self.foreign["failed"][key]
        if key not in self.foreign["objects"]:
            return "absent", _NO_PLACE
        if not getattr(loader, "use_stateful_dataloader", False):
            return "failed", "the folder has the state of a stateful loader; make this one stateful, too"
        if saved == self.run.ranks.size:
            return None
        return "failed", f"saved by {saved} rank(s), {self.run.ranks.size} here; resume on as many"

    def take_tree(self, name: str, key: str) -> None:
        """Match the folder's object `key` with the item `name`."""
        self.entries[name] = entry = self.foreign["objects"][key]
        self.names |= {f"{name}/{index}": f"{key}/{index}" for index in range(entry["tensors"])}

    def judge_rank(self, point: ResumePoint) -> None:
        """Note missing state of this rank: random numbers, and gradients of an unfinished step."""
        unread = self.foreign["failed"].get(f"random_{self.run.ranks.rank}")
        if unread is not None:
            self.outcomes.append(Restored("rng", "failed", unread))
        steps = getattr(self.run.accelerator, "gradient_accumulation_steps", 1)
        done = point.document["ranks"][0].get("accumulation", {}).get("tree", 0)
        if steps > 1 and done % steps:
            detail = f"saved {done % steps} batches after a step, whose gradients are not in the folder"
            self.outcomes.append(Restored("gradients", "absent", detail))

    def items_of(self, kind: str) -> list[tuple[str, str]]:
        """(number, item of the run) of the files of one kind that were read; notes the outcome of the others."""
        read, names = [], self.order[kind]
        for number, file in self.foreign["files"][kind].items():
            name = names[int(number)] if int(number) < len(names) else None
            failed = self.foreign["failed"].get(f"{kind}_{number}")
            if name is None:
                self.outcomes.append(Restored(file, "absent", "in the folder, not in this run"))
            elif failed is not None:
                self.outcomes.append(Restored(name, "failed", failed))
            else:
                read.append((number, name))
        return read


def _names_in_order(run: LiveRun, foreign: Document) -> dict[str, list[str | None]]:
    """The items of the run by kind, in the order in which Accelerate numbers its files; None for other objects."""
    names: dict[int, str | None] = {bare_identity(item.value): item.name for item in run.items}
    names[bare_identity(run.model)] = ""
    if run.accelerator is None:
        values = {kind: [item.value for item in run.items if isinstance(item.value, of)] for kind, of in _KINDS.items()}
        values["model"] = [run.model, *(item.value for item in run.items if item.kind == "model")]
    else:
        values = {kind: list(getattr(run.accelerator, listed, ())) for kind, listed in _LISTS.items()}
        values["scaler"] = [run.accelerator.scaler] if getattr(run.accelerator, "scaler", None) is not None else []
    order = {kind: [names.get(bare_identity(value)) for value in some] for kind, some in values.items()}
    known = {name for some in order.values() for name in some}
    others: list[str | None] = [item.name for item in run.items if item.kind == "object" and item.name not in known]
    if not order.get("custom"):  # objects registered with the saver may have been registered with Accelerate
        order["custom"] = others if len(others) == len(foreign["files"]["custom"]) else []
    return order


def _live_names(places: Mapping[str, str], live: Mapping[str, Source]) -> dict[str, str]:
    """`places` under the names of the live model's tensors; unknown names are kept."""
    renamed = {}
    for name, place in places.items():
        bare = name.replace("_orig_mod.", "")
        candidates = (name, bare, bare.removeprefix("module."))
        renamed[next((known for known in candidates if known in live), name)] = place
    for group in tied_names(live):
        stored = next((name for name in group if name in renamed), None)
        renamed |= {name: renamed[stored] for name in group if stored is not None and name not in renamed}
    return renamed


def _fit_optimizer(item: Item, stored: Document, labels: Mapping[str, Source]) -> tuple[Description, dict[str, str]]:
    """The description of an optimizer's state by names, and the number of each parameter in the folder.

    Raises LoadError if groups or shapes differ.
    """
    optimizer = optimizers.unwrap_optimizer(item.value)
    live_groups = _live_groups(optimizer, labels)
    live = [group["params"] for group in live_groups]
    stored_groups = [group["params"] for group in stored["groups"]]
    counts = [len(one) for one in stored_groups], [len(one) for one in live]
    if counts[0] != counts[1]:
        raise LoadError(
            f"groups of {listing([str(n) for n in counts[0]], ', ')} parameters in the folder, of "
            f"{listing([str(n) for n in counts[1]], ', ')} here; make the optimizer as the saved run did"
        )
    owners = {
        name: number
        for names, numbers in zip(live, stored_groups, strict=True)
        for name, number in zip(names, numbers, strict=True)
    }
    # torch keeps the step count in host memory, except for capturable and fused optimizers.
    on_device = {
        name: any(group["values"].get(option, {}).get("value") for option in ("capturable", "fused"))
        for group, members in zip(stored["groups"], live, strict=True)
        for name in members
    }
    state: Document = {}
    for name, number in owners.items():
        if number in stored["state"]:
            state[name] = {
                key: {**entry, "host": key == "step" and not on_device[name]} if "dtype" in entry else entry
                for key, entry in stored["state"][number].items()
            }
    problems = [
        f"{name}: {key} has shape {entry['shape']}, the parameter {list(labels[name].shape)}"
        for name, entries in state.items()
        for key, entry in entries.items()
        if len(entry.get("shape", ())) == len(labels[name].shape) and tuple(entry["shape"]) != labels[name].shape
    ]
    if problems:
        raise LoadError(f"{listing(problems)}; give the optimizer its parameters in the order of the saved run")
    _refuse_unproved_order(stored, live_groups, labels)
    groups = [{"params": members, "values": one["values"]} for members, one in zip(live, stored["groups"], strict=True)]
    return {"class": type(optimizer).__name__, "groups": groups, "state": state}, owners


def _live_groups(optimizer: Any, labels: Mapping[str, Source]) -> list[Document]:
    """The names of the parameters and the settings of each group.

    Raises LoadError if FSDP1 has flattened several into one.
    """
    if zero_optimizer.is_zero(optimizer):
        groups: list[Document] = zero_optimizer.describe(optimizer, labels)["groups"]
        return groups
    names = optimizers.names_of(optimizer, labels)
    if [len(members) for members in names] != [len(group["params"]) for group in optimizer.param_groups]:
        raise LoadError(
            "the folder has parameters by their order, and FSDP1 has put several into one here; resume with "
            "use_orig_params=True or under another wrapper"
        )
    pairs = zip(names, optimizer.param_groups, strict=True)
    return [{"params": members, "values": settings_of(group)} for members, group in pairs]


def _refuse_unproved_order(stored: Document, live: list[Document], labels: Mapping[str, Source]) -> None:
    """Raise LoadError for groups that may be in another order than in the folder, which has parameters by number.

    The names in the folder, the shapes of its state or the settings of the groups prove the order.
    """
    problems: list[str] = []
    groups = stored["groups"]
    for number, group in enumerate(groups):
        if group[_MEMBERS] is not None:
            problems += _other_names(number, group[_MEMBERS], live[number]["params"])
            continue
        for other in range(number):
            may_be_exchanged = _fits(group, live[other], stored["state"], labels)
            may_be_exchanged = may_be_exchanged and _fits(groups[other], live[number], stored["state"], labels)
            in_order = _agree(group, live[number]) and _agree(groups[other], live[other])
            exchanged = _agree(group, live[other]) and _agree(groups[other], live[number])
            if may_be_exchanged and (exchanged or not in_order):
                problems.append(f"groups {other} and {number}: neither shapes nor settings tell them apart")
    if problems:
        raise LoadError(
            f"{listing(problems)}; the saved run may have had its groups in another order: load the folder with "
            "accelerator.load_state, then saver.save_state()"
        )


def _fits(group: Document, live: Document, state: Document, labels: Mapping[str, Source]) -> bool:
    """Whether the shapes in the folder allow a group to be that of these live parameters."""
    if len(group["params"]) != len(live["params"]):
        return False
    for number, name in zip(group["params"], live["params"], strict=True):
        shapes = [tuple(entry.get("shape", ())) for entry in state.get(number, {}).values()]
        if any(len(shape) == len(labels[name].shape) and shape != labels[name].shape for shape in shapes):
            return False
    return True


def _other_names(number: int, stored: list[str], live: list[str]) -> list[str]:
    """The first name of a group that is another one here."""
    for before, now in zip(stored, live, strict=True):
        bare = before.replace("_orig_mod.", "")
        if now.rpartition(":")[2] not in (before, bare, bare.removeprefix("module.")):
            return [f"group {number}: {before} in the folder, {now} here"]
    return []


def _agree(stored: Document, live: Document) -> bool:
    """Whether a group of the folder has the settings of a live one, but for a rate that a scheduler changes."""
    keys = stored["values"].keys() & live["values"].keys()
    if "initial_lr" in keys:
        keys -= {"lr"}
    return all(stored["values"][key] == live["values"][key] for key in keys)


def _steps_done(foreign: Document, accelerator: Any, ranks: int) -> tuple[int, list[str]]:
    """The number of steps of the saved run, and a note on its source."""
    counts = [optimizer["steps"] for optimizer in foreign["optimizers"].values() if optimizer.get("steps") is not None]
    if counts:
        return max(counts), [f"step {max(counts)}: as the optimizer counts its own"]
    scheduler = next(iter(getattr(accelerator, "_schedulers", ())), None)
    calls = foreign["last_epoch"]
    if calls is None or not getattr(scheduler, "step_with_optimizer", False):
        return 0, [
            "step 0: neither the optimizer nor the scheduler has counted its steps; saver.step(step=...) sets it"
        ]
    each = 1 if getattr(scheduler, "split_batches", True) else ranks
    return calls // each, [f"step {calls // each}: from the scheduler's count of {calls}, {each} for each step"]


def _renamed_tensors(point: ResumePoint, names: Mapping[str, str]) -> StoredTensors:
    """The tensors of the folder, under the names of the run as well."""
    part = point.checkpoint.manifest.parts[0]
    file: TensorFile = point.tensors.file_of(FOLDER, part.tensors[0].name)
    both = {name: name for name in file.specs} | {new: old for new, old in names.items() if old in file.specs}
    renamed = RenamedFile(file, both)
    records = [TensorRecord(name, spec.shape, spec.dtype, "", 0, 0) for name, spec in renamed.specs.items()]
    manifest: Manifest = replace(point.checkpoint.manifest, parts=(replace(part, tensors=tuple(records)),))
    held = replace(point.checkpoint, manifest=manifest)
    return StoredTensors(held, lambda _part: renamed)
