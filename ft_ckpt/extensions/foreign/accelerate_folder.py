"""Resumes from folders of `accelerator.save_state`.

The folder is compared with the run, then Accelerate loads it. Such a folder numbers objects and
parameters instead of naming them. Every file is read before anything is overwritten, as Accelerate
reads it: by torch with `weights_only`, which executes nothing. What Accelerate would unpickle is
refused.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ft_ckpt.checkpoint.manifest import ACCELERATE_MARKER, MANIFEST_NAME
from ft_ckpt.errors import LoadError, listing
from ft_ckpt.extensions.foreign.accelerate_files import (
    OF_OBJECTS,
    folder_problems,
    numbered,
    optimizer_problems,
    read_values,
    weight_problems,
)
from ft_ckpt.ranks import Ranks
from ft_ckpt.runs.data import (
    DataPositions,
    GeneratorStates,
    generator_problems,
    plain_states,
    position_in_state,
    restore_generators,
)
from ft_ckpt.runs.items import bare_identity
from ft_ckpt.runs.loop import TrainingRun
from ft_ckpt.runs.optimizers import unwrap_optimizer
from ft_ckpt.runs.state import Restored, RestoreReport, restore_gradients
from ft_ckpt.storage.local import LocalStore

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
    """Find a folder of `save_state` at `path`: itself, or the last `checkpoint_N` in it, or None.

    In a project folder, checkpoints are below "checkpoints".
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
    # the outcomes of objects that the folder does not have
    outcomes: tuple[Restored, ...]

    def load(self, run: TrainingRun, run_id: str) -> RestoreReport:
        """Let Accelerate load the folder, and continue as the run `run_id`. Raises LoadError."""
        accelerator = run.accelerator
        prepared = _prepared_identities(accelerator)
        items = run.objects.items()
        names = [item.name for item in items if bare_identity(item.value) in prepared]
        try:
            accelerator.load_state(str(self.path))
        except Exception as error:
            raise LoadError(f"{self.path}: accelerator.load_state failed: {error}") from error

        for model in run.objects.models().values():
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
    problems = folder_problems(path, accelerator)
    if not problems:
        problems += weight_problems(path, accelerator._models)
        problems += optimizer_problems(path, accelerator)
        for number in range(len(accelerator._schedulers)):
            read_values(path, numbered("scheduler", number, ".bin"))
        if accelerator.scaler is not None:
            read_values(path, "scaler.pt")

    if problems:
        raise LoadError(
            f"{path}: {listing(problems)}; prepare the objects as the saved run did, or {_BY_HAND}"
        )

    name = f"random_states_{ranks.rank}.pkl"
    states = read_values(path, name)
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
    """Return the reason why Accelerate must not load the folder, or None if there is none."""
    names = sorted(entry.name for entry in path.iterdir())
    pickled = [name for name in names if _PICKLED.fullmatch(name)]
    if pickled:
        return (
            f"{listing(pickled, ', ')}: Accelerate executes what such a file contains; {_BY_HAND}"
        )

    sharded = [
        name for name in names if _SHARDED.fullmatch(name) and not OF_OBJECTS.fullmatch(name)
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


def _prepared_identities(accelerator: Any) -> set[int]:
    """Return the identities of the objects that Accelerate loads."""
    prepared = [*accelerator._models, *accelerator._optimizers, *accelerator._schedulers]
    if accelerator.scaler is not None:
        prepared.append(accelerator.scaler)
    return {bare_identity(value) for value in prepared}


def _absent_objects(run: TrainingRun) -> list[Restored]:
    """Return the outcomes of the run's items that Accelerate does not load."""
    prepared = _prepared_identities(run.accelerator)
    items = [("weights", run.model)]
    items += [(item.name, item.value) for item in run.objects.items()]
    names = [name for name, value in items if bare_identity(value) not in prepared]
    return [
        Restored(name, "absent", "not prepared by the Accelerator, which loads the folder")
        for name in names
    ]


def _generators_of(states: Mapping[str, Any]) -> GeneratorStates:
    """Return the random states of one rank as `restore_generators` takes them.

    States of another form give {}.
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
    """Return the positions of the loaders, which only stateful ones store.

    The second result is an outcome if a loader has no position.
    """
    positions = []
    for number, loader in enumerate(loaders):
        name = numbered("dl_state_dict", number, ".bin")
        if LocalStore(path).stat(name) is None:
            return DataPositions(), Restored("data", "absent", _NO_POSITION)
        if not getattr(loader, "use_stateful_dataloader", False):
            detail = f"{name} is the state of a stateful loader; make this one stateful, too"
            return DataPositions(), Restored("data", "failed", detail)
        positions.append(position_in_state(loader, read_values(path, name), ranks.size))
    return DataPositions(positions), None


def _steps_done(accelerator: Any) -> tuple[int, str]:
    """Return the number of steps that Accelerate has loaded, and a message on its source."""
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
