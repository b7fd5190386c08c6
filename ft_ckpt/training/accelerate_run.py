"""Matches the numbered objects of an `accelerator.save_state` folder with the items of a run.

Models, optimizers, schedulers and registered objects are matched by the order in which they were prepared, parameters
of an optimizer by their order in its groups, because the folder has no names; shapes are compared.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ft_ckpt.checkpoint.manifest import Manifest
from ft_ckpt.distributed.source import Source
from ft_ckpt.errors import CheckpointError, LoadError, listing
from ft_ckpt.formats.layout import TensorFile, TensorRecord
from ft_ckpt.formats.tensor_file import RenamedFile
from ft_ckpt.training import optimizers, zero_optimizer
from ft_ckpt.training.data_position import describe_data
from ft_ckpt.training.items import (
    Item,
    bare_identity,
    labelled_sources,
    model_sources,
    tied_names,
)
from ft_ckpt.training.optimizers import Description
from ft_ckpt.training.restore import LiveRun, Restored
from ft_ckpt.training.state import FOLDER, Document, ResumePoint, StoredTensors, flatten_tree

_LISTS = {"model": "_models", "optimizer": "_optimizers", "scheduler": "_schedulers", "custom": "_custom_objects"}
_KINDS = {
    "optimizer": torch.optim.Optimizer,
    "scheduler": torch.optim.lr_scheduler.LRScheduler,
    "scaler": torch.amp.GradScaler,
}
_NO_PLACE = (
    "save_state keeps no place in the data, except of stateful loaders; make the switch at the end of a pass, or skip "
    "the batches that were done as after load_state"
)


def fit_point(
    point: ResumePoint, live: LiveRun
) -> tuple[ResumePoint, list[Item], tuple[Restored, ...], tuple[str, ...]]:
    """`point` under the names of the run; the items to restore; outcomes known in advance; and notes for the report.

    A checkpoint of ours is returned as it is.
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
    names: dict[str, str] = field(default_factory=dict)  # of tensors: ours, and the folder's
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
        found, live = [], self.order[kind]
        for number, file in self.foreign["files"][kind].items():
            name = live[int(number)] if int(number) < len(live) else None
            failed = self.foreign["failed"].get(f"{kind}_{number}")
            if name is None:
                self.outcomes.append(Restored(file, "absent", "in the folder, not in this run"))
            elif failed is not None:
                self.outcomes.append(Restored(name, "failed", failed))
            else:
                found.append((number, name))
        return found


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
    found = {}
    for name, place in places.items():
        bare = name.replace("_orig_mod.", "")
        found[next((one for one in (name, bare, bare.removeprefix("module.")) if one in live), name)] = place
    for group in tied_names(live):
        stored = next((name for name in group if name in found), None)
        found |= {name: found[stored] for name in group if stored is not None and name not in found}
    return found


def _fit_optimizer(item: Item, stored: Document, labels: Mapping[str, Source]) -> tuple[Description, dict[str, str]]:
    """The description of an optimizer's state by names, and the number of each parameter in the folder.

    Raises LoadError if groups or shapes differ.
    """
    optimizer = optimizers.unwrap_optimizer(item.value)
    live = _names_of_groups(optimizer, labels)
    there = [group["params"] for group in stored["groups"]]
    counts = [len(one) for one in there], [len(one) for one in live]
    if counts[0] != counts[1]:
        raise LoadError(
            f"groups of {listing([str(n) for n in counts[0]], ', ')} parameters in the folder, of "
            f"{listing([str(n) for n in counts[1]], ', ')} here; make the optimizer as the saved run did"
        )
    owners = {
        name: number
        for ours, theirs in zip(live, there, strict=True)
        for name, number in zip(ours, theirs, strict=True)
    }
    # torch keeps the count of steps in main memory, except of capturable and fused optimizers.
    on_device = {
        name: any(group["values"].get(option, {}).get("value") for option in ("capturable", "fused"))
        for group, some in zip(stored["groups"], live, strict=True)
        for name in some
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
    groups = [{"params": some, "values": one["values"]} for some, one in zip(live, stored["groups"], strict=True)]
    return {"class": type(optimizer).__name__, "groups": groups, "state": state}, owners


def _names_of_groups(optimizer: Any, labels: Mapping[str, Source]) -> list[list[str]]:
    """The names of the parameters in each group. Raises LoadError if FSDP1 has flattened several into one."""
    if zero_optimizer.is_zero(optimizer):
        return [group["params"] for group in zero_optimizer.describe(optimizer, labels)["groups"]]
    names = optimizers.names_of(optimizer, labels)
    if [len(some) for some in names] != [len(group["params"]) for group in optimizer.param_groups]:
        raise LoadError(
            "the folder has parameters by their order, and FSDP1 has put several into one here; resume with "
            "use_orig_params=True or under another wrapper"
        )
    return names


def _steps_done(foreign: Document, accelerator: Any, ranks: int) -> tuple[int, list[str]]:
    """The number of steps of the saved run, and a note on its source."""
    counts = [one["steps"] for one in foreign["optimizers"].values() if one.get("steps") is not None]
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
    records = [TensorRecord(name, one.shape, one.dtype, "", 0, 0) for name, one in renamed.specs.items()]
    manifest: Manifest = replace(point.checkpoint.manifest, parts=(replace(part, tensors=tuple(records)),))
    held = replace(point.checkpoint, manifest=manifest)
    return StoredTensors(held, lambda _part: renamed)
