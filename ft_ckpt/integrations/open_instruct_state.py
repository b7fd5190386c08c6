"""Reads and writes the checkpoint-state folder of open-instruct's GRPO trainer.

DeepSpeed's `save_checkpoint` writes this folder. It holds the state of the engine and a client
state: the step, the episode, the positions of the loaders, and the RNG states of the rank that
wrote the file. DeepSpeed's own reader executes pickles. Therefore this module reads the files
without executing anything, and DeepSpeed restores its engine from these values.

Format: `open_instruct/grpo_fast.py` of August 2026, on DeepSpeed 0.18.3 to 0.19.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ft_ckpt.errors import LoadError, NotACheckpointError, damaged_input, listing
from ft_ckpt.extensions.foreign.torch_files import compare_sums, load_torch_values
from ft_ckpt.formats.files import RawFile, StandIn
from ft_ckpt.messages import warn
from ft_ckpt.ranks import Ranks, current_ranks
from ft_ckpt.ranks.wrappers import ModelTensors
from ft_ckpt.runs.data import generator_problems, plain_states, restore_generators
from ft_ckpt.runs.state import Restored, RestoreReport, agree_on_outcomes
from ft_ckpt.storage import is_inside, read_text
from ft_ckpt.storage.local import LocalStore, check_files_inside
from ft_ckpt.storage.places import Place

# What the client state of open-instruct holds.
_CLIENT_KEYS = (
    "training_step",
    "episode",
    "num_total_tokens",
    "dataloader_state",
    "data_prep_actor_state",
)
# The keys of the engine and of one rank. All other keys of a file belong to the client state.
_ENGINE_KEYS = frozenset(
    (
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "frozen_param_fragments",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "ds_config",
        "ds_version",
        "sparse_tensor_module_names",
        "num_experts",
        "ds_autoep_layers",
        "checkpoint_parallel_dimensions",
        "rng_states",
        "rank",
    )
)
_MODEL_STATES, _OPTIMIZER_STATES = "_model_states.pt", "_optim_states.pt"
_LATEST, _MAX_LATEST_BYTES = "latest", 4096
_SCALERS = "deepspeed.runtime.fp16.loss_scaler"
_NOT_IN_FOLDER = "not in the folder"
_IN_FLIGHT = (
    "prompts that were in flight are not in the folder: the data preparation actor generates "
    "them again"
)


class ClientState(dict[str, Any]):
    """The client state of a run (`training_step`, `episode`, ...), which a saver can register."""

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the values."""
        return dict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all values."""
        self.clear()
        self.update(state)


def load_checkpoint_state(
    engine: Any, checkpoint_state_dir: str | Path, client: ClientState
) -> RestoreReport:
    """Restore a DeepSpeed engine and `client` from a checkpoint-state folder.

    Call it on every rank. Restores weights, optimizer, scheduler, counters, and the RNG states of
    the ranks that stored them: under ZeRO-3 each rank, else rank 0. The report lists the outcome of
    each item; items that the folder lacks also cause a warning. Every file is read and compared
    with its checksums before the engine changes. Nothing in the folder is executed.

    Raises NotACheckpointError if the folder has no files of DeepSpeed. Raises LoadError if a file
    holds anything but tensors, plain data and DeepSpeed's own records, if the number of ranks, the
    stage or the precision is another one, and if names or shapes of parameters differ. Raises
    CorruptError if a file is damaged, and RankError if another rank failed.
    """
    ranks, folder = current_ranks(), Path(checkpoint_state_dir)
    tag, error = ranks.attempt(lambda: _check_folder(engine, folder, ranks))
    ranks.agree("load_checkpoint_state()", error=error)
    states, error = ranks.attempt(lambda: _restore_engine(engine, folder, tag))
    ranks.agree("load_checkpoint() of DeepSpeed", error=error)
    client.load_state_dict({key: value for key, value in states.items() if key not in _ENGINE_KEYS})
    outcomes = [Restored("weights", "restored"), Restored("optimizer", "restored")]
    if engine.lr_scheduler is not None:
        outcomes.append(Restored("scheduler", "restored"))
    for key in _CLIENT_KEYS:
        if key in client:
            outcomes.append(Restored(key, "restored"))
        else:
            outcomes.append(Restored(key, "absent", _NOT_IN_FOLDER))

    generators, error = ranks.attempt(lambda: _restore_generators(states, ranks.rank))
    if generators is not None:
        outcomes.append(generators)
    items, _ = agree_on_outcomes(ranks, "random numbers", outcomes, 0, error)
    report = RestoreReport(folder / tag, items, notes=(_IN_FLIGHT,))
    if report.problems and ranks.is_main:
        warn(f"{report.path}: {listing(list(report.problems))}")
    return report


def save_checkpoint_state(
    engine: Any, checkpoint_state_dir: str | Path, client: Mapping[str, Any]
) -> None:
    """Write a checkpoint-state folder that open-instruct's GRPO trainer resumes from.

    Call it on every rank. The RNG states of each rank are added to the client state `client`.
    DeepSpeed writes the files, and under ZeRO-1 and -2 it stores the client state of rank 0 only.
    The write is not atomic, but the file `latest`, which names the new checkpoint, is written last.
    """
    states: dict[str, Any] = {
        "torch_cpu_rng_state": torch.get_rng_state(),
        "numpy_rng_state": np.random.get_state(),
        "python_rng_state": random.getstate(),
    }
    if torch.cuda.is_available():
        devices = torch.cuda.get_rng_state_all()
        states["torch_cuda_rng_state_all"] = devices
        by_device = {f"cuda:{index}": state for index, state in enumerate(devices)}
        states["torch_cuda_rng_states"] = by_device
    with _with_attributes(engine, mpu=None):
        client_state = {**client, "rng_states": states, "rank": current_ranks().rank}
        engine.save_checkpoint(str(checkpoint_state_dir), client_state=client_state)


def _check_folder(engine: Any, folder: Path, ranks: Ranks) -> str:
    """Check that the checkpoint in `folder` is whole and fits the engine, and return its tag.

    The ranks divide the files: each file is compared with its checksums by one rank. Raises
    LoadError if the checkpoint does not fit.
    """
    place = _step_folder(Place(LocalStore(folder)))
    names: list[str] = []
    if place is not None:
        names = sorted(name for name in _file_names(place) if name.endswith(".pt"))
    model_files = [name for name in names if name.endswith(_MODEL_STATES)]
    if place is None or not model_files:
        raise NotACheckpointError(
            f"{folder}: no *_model_states.pt in it; expected --checkpoint_state_dir of grpo_fast"
        )

    if engine.load_universal_checkpoint():
        raise LoadError(
            f"{folder}: DeepSpeed reads universal checkpoints by itself; set "
            "load_universal to False"
        )

    scaler = getattr(engine.optimizer, "loss_scaler", None)
    for name in names[ranks.rank :: ranks.size]:
        _read_states(Path(folder, place.name, name), scaler, checked=True)
    stored = _read_states(Path(folder, place.name, model_files[0]), scaler)
    optimizer_files = [name for name in names if name.endswith(_OPTIMIZER_STATES)]
    problems = _misfits(engine, stored, model_files[0], optimizer_files)
    if problems:
        raise LoadError(
            f"{folder}: {listing(problems)}; make the engine as the saved run did. Once ft_ckpt "
            "has saved it, saver.resume() takes it to other ranks and stages"
        )

    return place.name


def _misfits(
    engine: Any, stored: Mapping[str, Any], model_file: str, optimizer_files: Sequence[str]
) -> list[str]:
    """Describe the settings and shapes in which the engine differs from the stored one."""
    num_ranks = engine.seq_dp_world_size
    is_zero = engine.zero_optimization()
    num_optimizer_files = num_ranks if is_zero else 0
    with damaged_input(model_file):
        shapes = {}
        for group in stored["param_shapes"] or ():
            for name, shape in group.items():
                shapes[name] = tuple(shape)

        # what is compared: its value in the folder, and in the engine
        compared: dict[str, tuple[Any, Any]] = {
            "ranks": (stored["dp_world_size"], num_ranks),
            "ZeRO-3": (
                model_file.startswith("zero_pp_rank"),
                engine.zero_optimization_partition_weights(),
            ),
            "files of ZeRO's optimizer": (len(optimizer_files), num_optimizer_files),
            "optimizer state of bfloat16": (
                any(name.startswith("bf16_") for name in optimizer_files),
                is_zero and engine.bfloat16_enabled(),
            ),
            "scheduler": (stored["lr_scheduler"] is not None, engine.lr_scheduler is not None),
            "training_step": ("training_step" in stored, True),
        }

    live = {name: source.shape for name, source in ModelTensors(engine).sources().items()}
    for name, shape in shapes.items():
        compared[name] = (shape, live.get(name))
    problems = []
    for name, (saved, current) in compared.items():
        if saved != current:
            problems.append(f"{name}: {saved} in the folder, {current} here")

    return problems


def _step_folder(place: Place) -> Place | None:
    """Find the folder that holds the files of the ranks.

    It is `place` itself, or the folder that the file `latest` in it names. Returns None if neither
    holds such files.
    """
    store = place.folder
    candidates = [place]
    if store.stat(_LATEST) is not None:
        check_files_inside(store, [_LATEST])
        name = read_text(store, _LATEST, _MAX_LATEST_BYTES, errors="replace").strip()
        if is_inside(name):
            candidates.append(Place(store, name))
    endings = (_MODEL_STATES, _OPTIMIZER_STATES)
    for candidate in candidates:
        if any(name.endswith(endings) for name in _file_names(candidate)):
            return candidate
    return None


def _file_names(place: Place) -> list[str]:
    return [entry.name for entry in place.folder.list_folder().objects]


def _restore_engine(engine: Any, folder: Path, tag: str) -> dict[str, Any]:
    """Let DeepSpeed restore the engine from values that are read here.

    Returns what the model-states file holds besides the weights; the client state is in it.
    """
    model_states: dict[str, Any] = {}

    def load(path: str, map_location: Any = None) -> Any:
        value = _read_states(Path(path), getattr(engine.optimizer, "loss_scaler", None))
        if path.endswith(_MODEL_STATES):
            model_states.update(value)
            model_states.pop("module", None)
        return value

    with _with_attributes(engine, checkpoint_engine=SimpleNamespace(load=load), mpu=None):
        engine.load_checkpoint(str(folder), tag=tag)
    return model_states


def _read_states(path: Path, scaler: Any, *, checked: bool = False) -> Any:
    """Read the states in a file of DeepSpeed. With `checked`, compare its checksums first.

    A loss scaler in the file becomes a copy of `scaler` that has the numbers of the file.
    """

    def stored_scaler(stored: StandIn) -> Any:
        if scaler is None or stored.kind != f"{_SCALERS}.{type(scaler).__name__}":
            raise LoadError(
                f"{path}: a {stored.kind}, the engine has {type(scaler).__name__}; "
                "use the same precision"
            )
        copy = object.__new__(type(scaler))
        vars(copy).update(vars(scaler))
        for key in vars(scaler):
            if type(stored.state.get(key)) in (int, float, bool):
                vars(copy)[key] = stored.state[key]
        return copy

    objects: dict[str, Callable[[StandIn], Any]] = {
        "deepspeed.runtime.zero.config.ZeroStageEnum": lambda stored: int(stored.args[0]),
        # only universal checkpoints need it
        "deepspeed.utils.tensor_fragment.fragment_address": lambda _: None,
        f"{_SCALERS}.LossScaler": stored_scaler,
        f"{_SCALERS}.DynamicLossScaler": stored_scaler,
    }
    with closing(LocalStore(path.parent).open(path.name)) as file, damaged_input(str(path)):
        raw = RawFile(file)
        if checked:
            compare_sums(raw)
        return load_torch_values(raw, objects)


def _restore_generators(stored: Mapping[str, Any], rank: int) -> Restored:
    if "rng_states" not in stored:
        return Restored("rng", "absent", _NOT_IN_FOLDER)
    if stored.get("rank") != rank:
        return Restored(
            "rng", "absent", "the folder has RNG states of rank 0 only; this rank keeps its own"
        )

    with damaged_input("rng_states"):
        states = stored["rng_states"]
        generators = plain_states(
            states["python_rng_state"], states["numpy_rng_state"], states["torch_cpu_rng_state"]
        )
        devices = states.get("torch_cuda_rng_states")
        if devices:
            generators["cuda"] = {
                name.removeprefix("cuda:"): state for name, state in devices.items()
            }

    problems = generator_problems(generators)
    if not problems:
        problems = restore_generators(generators)
    return Restored("rng", "failed" if problems else "restored", "; ".join(problems))


@contextmanager
def _with_attributes(engine: Any, **values: Any) -> Iterator[None]:
    """Set attributes of the engine within the block.

    `mpu` describes sequence parallelism. open-instruct unsets it as well.
    """
    before = {name: getattr(engine, name) for name in values}
    vars(engine).update(values)
    try:
        yield
    finally:
        vars(engine).update(before)
