"""Resumes from a folder of `accelerator.save_state`: it is compared with the run, then Accelerate
loads it.

Such a folder numbers objects and parameters instead of naming them. Every file is read before
anything is overwritten, as Accelerate reads it: by torch with `weights_only`, which executes
nothing. What Accelerate would unpickle is refused.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ft_ckpt.checkpoint import ACCELERATE_MARKER, MANIFEST_NAME
from ft_ckpt.errors import LoadError, listing
from ft_ckpt.model import join_weight_files
from ft_ckpt.ranks import Ranks
from ft_ckpt.runs import (
    DataPositions,
    GeneratorStates,
    Restored,
    RestoreReport,
    TrainingRun,
    bare_identity,
    generator_problems,
    plain_states,
    position_in_state,
    restore_generators,
    restore_gradients,
    run_items,
    settings_of,
    unwrap_optimizer,
)
from ft_ckpt.storage import LocalStore

_OF_OBJECTS = re.compile(
    r"((pytorch_)?model(_\d+)?\.(safetensors|bin)|(optimizer|scheduler)(_\d+)?\.bin|scaler\.pt)"
)
_PICKLED = re.compile(r"custom_checkpoint_\d+\.pkl")
_SHARDED = re.compile(
    r"pytorch_model(_fsdp)?(_\d+)?(\.bin)?|optimizer(_\d+)?|zero_to_fp32\.py|latest|mp_rank_.*"
)
# `load_state` reads pickles for these engines
_OTHER_LOADERS = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA")
_BY_HAND = (
    "load it with accelerator.load_state in a script that trusts it, then call saver.save_state()"
)
_FROM_HERE = "passes, batches and samples are counted from here"
_NO_POSITION = (
    "save_state stores no data position, except of stateful loaders; make the switch at the end of "
    "a pass, or skip the batches that were done as after load_state"
)


def find_accelerate_folder(path: Path) -> Path | None:
    """The folder of `save_state` at `path`: itself, or the `checkpoint_N` in it with the highest
    number; None without.

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


@dataclass(frozen=True, eq=False)
class AccelerateFolder:
    """A folder of `save_state` that was read on this rank and fits the run."""

    path: Path
    generators: GeneratorStates
    positions: DataPositions
    outcomes: tuple[Restored, ...]  # of what the folder lacks

    def load(self, run: TrainingRun, run_id: str) -> RestoreReport:
        """Let Accelerate load the folder, and continue as the run `run_id`. Raises LoadError."""
        accelerator = run.accelerator
        prepared = _prepared_identities(accelerator)
        items = run_items(accelerator, run.registered)
        names = [item.name for item in items if bare_identity(item.value) in prepared]
        try:
            accelerator.load_state(str(self.path))
        except Exception as error:
            raise LoadError(f"{self.path}: accelerator.load_state failed: {error}") from error
        for model in run.models_by_item().values():
            restore_gradients(model, {})
        run.feeds = self.positions
        step, note = _steps_done(accelerator)
        progress = {"step": step, "epoch": 0}
        run.restore_progress(
            {"progress": progress, "run_id": run_id, "history": None}, LocalStore(self.path), ""
        )
        outcomes = [
            Restored(name, "restored", "by accelerator.load_state") for name in ("weights", *names)
        ]
        if self.positions.state_dicts():
            outcomes.append(Restored("data", "restored", "by accelerator.load_state"))
        # Accelerate only logs what it cannot restore
        problems = restore_generators(self.generators)
        outcomes.append(Restored("rng", "failed" if problems else "restored", listing(problems)))
        return RestoreReport(self.path, (*self.outcomes, *outcomes), (), (note, _FROM_HERE))


def read_accelerate_folder(path: Path, run: TrainingRun, ranks: Ranks) -> AccelerateFolder:
    """Read the folder of `save_state` at `path` and compare it with `run`; changes nothing.

    Raises LoadError naming files that Accelerate would unpickle or that are damaged, and what does
    not fit the run.
    """
    accelerator = run.accelerator
    if accelerator is None:
        raise LoadError(
            f"{path}: a folder of Accelerate's save_state, which only Accelerate reads; pass the "
            "Accelerator that prepared the objects: CheckpointSaver(accelerator, ...)"
        )
    refusal = _why_refused(path, accelerator, ranks)
    if refusal is not None:
        raise LoadError(f"{path}: {refusal}")
    problems = _file_problems(path, accelerator)
    if not problems:
        problems += _weight_problems(path, accelerator._models)
        problems += _optimizer_problems(path, accelerator)
        for number in range(len(accelerator._schedulers)):
            _read_values(path, _numbered("scheduler", number, ".bin"))
        if accelerator.scaler is not None:
            _read_values(path, "scaler.pt")
    if problems:
        raise LoadError(
            f"{path}: {listing(problems)}; prepare the objects as the saved run did, or {_BY_HAND}"
        )
    name = f"random_states_{ranks.rank}.pkl"
    states = _read_values(path, name)
    if not isinstance(states, dict) or type(states.get("step", 0)) is not int:
        raise LoadError(f"{path / name}: not the random states of a rank; use another folder")
    generators = _generators_of(states)
    outcomes = _absent_objects(run)
    problems = generator_problems(generators)
    if problems:
        outcomes.append(Restored("rng", "failed", listing(problems)))
    batches = states.get("step", 0) % accelerator.gradient_accumulation_steps
    if batches:
        detail = f"saved {batches} batches after a step, whose gradients are not in the folder"
        outcomes.append(Restored("gradients", "absent", detail))
    positions, problem = _positions_of(path, accelerator._dataloaders, ranks)
    if problem is not None:
        outcomes.append(problem)
    return AccelerateFolder(path, generators, positions, tuple(outcomes))


def _why_refused(path: Path, accelerator: Any, ranks: Ranks) -> str | None:
    """Why Accelerate must not load the folder; None if it may."""
    names = sorted(entry.name for entry in path.iterdir())
    pickled = [name for name in names if _PICKLED.fullmatch(name)]
    if pickled:
        return (
            f"{listing(pickled, ', ')}: Accelerate executes what such a file contains; {_BY_HAND}"
        )
    sharded = [
        name for name in names if _SHARDED.fullmatch(name) and not _OF_OBJECTS.fullmatch(name)
    ]
    if sharded:
        return (
            f"{listing(sharded, ', ')}: sharded by FSDP or DeepSpeed, expected model.safetensors "
            f"or pytorch_model.bin; {_BY_HAND}, on as many ranks as saved it. The weights of FSDP "
            "alone are read by `ft-ckpt convert`"
        )
    engine = accelerator.distributed_type.value
    if engine in _OTHER_LOADERS:
        return (
            f"Accelerate reads it by pickles under {engine}, expected a plain model or DDP; "
            f"{_BY_HAND}"
        )
    if accelerator._custom_objects:
        return (
            f"has no states for the {len(accelerator._custom_objects)} objects of "
            "register_for_checkpointing, expected custom_checkpoint_0.pkl; pass them to "
            "saver.register instead"
        )
    of_further_rank = f"random_states_{ranks.size}.pkl"
    if of_further_rank in names:
        return (
            f"{of_further_rank}: more ranks have saved it than the {ranks.size} here; resume "
            "on as many"
        )
    return None


def _file_problems(path: Path, accelerator: Any) -> list[str]:
    """The files that Accelerate would miss, and those that it would leave unread."""
    expected = [_weights_name(path, number) for number in range(len(accelerator._models))]
    expected += _numbered_names("optimizer", accelerator._optimizers)
    expected += _numbered_names("scheduler", accelerator._schedulers)
    if accelerator.scaler is not None:
        expected.append("scaler.pt")
    names = [entry.name for entry in path.iterdir()]
    stored = {name for name in names if _OF_OBJECTS.fullmatch(name)}
    problems = [f"{name}: not in the folder" for name in expected if name not in stored]
    for name in sorted(stored.difference(expected)):
        problems.append(f"{name}: of an object that this run has not")
    return problems


def _weights_name(path: Path, number: int) -> str:
    """The file of a model; of two, the one that Accelerate reads."""
    safe = _numbered("model", number, ".safetensors")
    pickled = _numbered("pytorch_model", number, ".bin")
    return pickled if (path / pickled).exists() and not (path / safe).exists() else safe


def _numbered(stem: str, number: int, suffix: str) -> str:
    return f"{stem}_{number}{suffix}" if number else f"{stem}{suffix}"


def _numbered_names(stem: str, objects: Sequence[Any]) -> list[str]:
    return [_numbered(stem, number, ".bin") for number in range(len(objects))]


def _read_values(path: Path, name: str) -> Any:
    """The values in a file, as Accelerate reads it; tensors are mapped. Raises LoadError."""
    from accelerate.utils import load

    try:
        return load(path / name, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        kind = type(error).__name__
        raise LoadError(
            f"{path / name}: torch.load(weights_only=True) fails ({kind}): the file is missing or "
            "damaged, or refers to code, which is not executed; use another folder"
        ) from error


def _weight_problems(path: Path, models: Sequence[nn.Module]) -> Iterator[str]:
    """The tensors of the models that are missing, unknown or of another shape in the folder."""
    for number, model in enumerate(models):
        file_name = _weights_name(path, number)
        values = model.state_dict(keep_vars=True).items()
        live = {_bare_name(name): value for name, value in values if isinstance(value, Tensor)}
        shapes: dict[str, tuple[int, ...]] = {}
        with closing(join_weight_files(LocalStore(path), [file_name])) as file:
            for name, spec in file.specs.items():
                shapes[_bare_name(name)] = spec.shape
            for alias, name in file.ties.items():
                shapes[_bare_name(alias)] = file.specs[name].shape
        tied = {id(live[name]) for name in shapes if name in live}
        for name, shape in shapes.items():
            if name not in live:
                yield f"{file_name}: {name}: not in the model"
            elif shape != tuple(live[name].shape):
                yield f"{file_name}: {name}: {list(shape)}, {list(live[name].shape)} in the model"
        for name, value in live.items():
            if name not in shapes and id(value) not in tied:
                yield f"{file_name}: {name}: not in the file, and the model has it"


def _optimizer_problems(path: Path, accelerator: Any) -> Iterator[str]:
    """What shows that the parameters of the optimizers have another order than in the folder, which
    numbers them.
    """
    names: dict[int, str] = {}
    for model in accelerator._models:
        for name, parameter in model.named_parameters():
            names[id(parameter)] = name
    for number, optimizer in enumerate(accelerator._optimizers):
        file_name = _numbered("optimizer", number, ".bin")
        state = _read_values(path, file_name)
        try:
            for problem in _group_problems(state, unwrap_optimizer(optimizer).param_groups, names):
                yield f"{file_name}: {problem}"
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise LoadError(
                f"{path / file_name}: not the state of an optimizer; use another folder"
            ) from error


def _group_problems(
    state: Mapping[str, Any], live_groups: Sequence[Mapping[str, Any]], names: Mapping[int, str]
) -> Iterator[str]:
    """The differences of an optimizer's groups; `names`: of the live parameters by identity."""
    groups = state["param_groups"]
    before = [str(len(group["params"])) for group in groups]
    now = [str(len(group["params"])) for group in live_groups]
    if before != now:
        yield (
            f"groups of {listing(before, ', ')} parameters in the folder, of "
            f"{listing(now, ', ')} here"
        )
        return
    for number, (group, live) in enumerate(zip(groups, live_groups, strict=True)):
        live_names = [
            names.get(id(parameter), "a parameter of no prepared model")
            for parameter in live["params"]
        ]
        # if the optimizer was made of named parameters
        saved_names = group.get("param_names", live_names)
        for saved_name, live_name in zip(saved_names, live_names, strict=True):
            if _bare_name(saved_name) != _bare_name(live_name):
                yield f"group {number}: {saved_name} in the folder, {live_name} here"
        for index, parameter, name in zip(group["params"], live["params"], live_names, strict=True):
            problem = _shape_problem(state["state"].get(index, {}), parameter)
            if problem is not None:
                yield f"{name}: {problem}"
        if "param_names" in group or _has_settings(group, live):
            continue
        alike = []
        for other_number, other in enumerate(live_groups):
            if _has_settings(group, other):
                alike.append(str(other_number))
        if alike:
            yield (
                f"group {number} has the settings of group {listing(alike, ', ')} here: "
                "another order"
            )


def _shape_problem(entries: Mapping[str, Any], parameter: Tensor) -> str | None:
    """What shows by its shape that the state `entries` is of another parameter."""
    shapes: dict[str, list[int]] = {}
    for key, value in entries.items():
        if isinstance(value, Tensor) and value.ndim == parameter.ndim:
            shapes[key] = list(value.shape)
    # others are statistics of the optimizer's own form
    if not shapes or list(parameter.shape) in shapes.values():
        return None
    key, shape = next(iter(shapes.items()))
    return f"{key} has shape {shape}, the parameter {list(parameter.shape)}"


def _has_settings(group: Mapping[str, Any], live: Mapping[str, Any]) -> bool:
    """Whether a stored group has the settings of a live one, but for a rate that a scheduler
    changes.
    """
    before, now = settings_of(group), settings_of(live)
    keys = before.keys() & now.keys() - {"param_names"}
    if "initial_lr" in keys:
        keys -= {"lr"}
    return all(before[key] == now[key] for key in keys)


def _bare_name(name: str) -> str:
    """The name of a tensor without the prefixes of DDP and torch.compile, which Accelerate may have
    removed.
    """
    return name.replace("_orig_mod.", "").removeprefix("module.")


def _prepared_identities(accelerator: Any) -> set[int]:
    """The identities of the objects that Accelerate loads."""
    prepared = [*accelerator._models, *accelerator._optimizers, *accelerator._schedulers]
    if accelerator.scaler is not None:
        prepared.append(accelerator.scaler)
    return {bare_identity(value) for value in prepared}


def _absent_objects(run: TrainingRun) -> list[Restored]:
    """The items of the run that Accelerate does not load."""
    prepared = _prepared_identities(run.accelerator)
    items = [("weights", run.model)]
    items += [(item.name, item.value) for item in run_items(run.accelerator, run.registered)]
    names = [name for name, value in items if bare_identity(value) not in prepared]
    return [
        Restored(name, "absent", "not prepared by the Accelerator, which loads the folder")
        for name in names
    ]


def _generators_of(states: Mapping[str, Any]) -> GeneratorStates:
    """The random states of one rank as `restore_generators` takes them; empty if they have
    another form.
    """
    try:
        generators = plain_states(
            states["random_state"], states["numpy_random_seed"], states["torch_manual_seed"]
        )
    except (KeyError, TypeError, ValueError):
        return {}
    for key, value in states.items():
        device = re.fullmatch(r"torch_(\w+)_manual_seed", key)
        if device is not None and isinstance(value, (list, tuple)):
            generators[device[1]] = {str(number): state for number, state in enumerate(value)}
    return generators


def _positions_of(
    path: Path, loaders: Sequence[Any], ranks: Ranks
) -> tuple[DataPositions, Restored | None]:
    """The positions of the loaders, which only stateful ones store; and the outcome if one has
    none.
    """
    positions = []
    for number, loader in enumerate(loaders):
        name = _numbered("dl_state_dict", number, ".bin")
        if not (path / name).exists():
            return DataPositions(), Restored("data", "absent", _NO_POSITION)
        if not getattr(loader, "use_stateful_dataloader", False):
            detail = f"{name} is the state of a stateful loader; make this one stateful, too"
            return DataPositions(), Restored("data", "failed", detail)
        positions.append(position_in_state(loader, _read_values(path, name), ranks.size))
    return DataPositions(positions), None


def _steps_done(accelerator: Any) -> tuple[int, str]:
    """The number of steps of the run that Accelerate has loaded, and a note on its source."""
    counts: list[int] = []
    for optimizer in accelerator._optimizers:
        states = unwrap_optimizer(optimizer).state.values()
        counts += [int(state["step"]) for state in states if "step" in state]
    if counts:
        return max(counts), f"step {max(counts)}: as the optimizer counts its own"
    scheduler = next(iter(accelerator._schedulers), None)
    if scheduler is None or not getattr(scheduler, "step_with_optimizer", False):
        note = (
            "step 0: neither the optimizer nor the scheduler has counted its steps; "
            "saver.step(step=...) sets it"
        )
        return 0, note
    calls = scheduler.scheduler.last_epoch
    calls_each_step = 1 if scheduler.split_batches else accelerator.num_processes
    steps = calls // calls_each_step
    note = f"step {steps}: from the scheduler's count of {calls}, {calls_each_step} for each step"
    return steps, note
