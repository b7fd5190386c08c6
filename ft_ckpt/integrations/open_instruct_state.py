"""The checkpoint-state folder of open-instruct's GRPO trainer: reading and writing.

The folder has the state of a DeepSpeed engine. DeepSpeed's `save_checkpoint` writes the folder,
with a client state: the step, the episode, the positions of the loaders, and the RNG states of the
rank that wrote the file. DeepSpeed restores its engine from values that are read here, because its
own reader executes pickles.

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

_EXPECTED = (
    "training_step",
    "episode",
    "num_total_tokens",
    "dataloader_state",
    "data_prep_actor_state",
)
# of the engine, and of one rank; all other keys of a file are the client state
_OTHER_KEYS = frozenset(
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
_ABSENT = "absent", "not in the folder"
_IN_FLIGHT = (
    "prompts that were in flight are not in the folder: the data preparation actor generates "
    "them again"
)


class ClientState(dict[str, Any]):
    """The client state of a run, as an object that a saver can register.

    The state has `training_step`, `episode`, ...
    """

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

    Raises NotACheckpointError without DeepSpeed's files; LoadError for anything but tensors, plain
    data and DeepSpeed's own records, for a folder of another number of ranks, stage or precision,
    and for parameters with other names or shapes; CorruptError for damaged files; RankError when
    another rank failed.
    """
    ranks, folder = current_ranks(), Path(checkpoint_state_dir)
    tag, error = ranks.attempt(lambda: _check_folder(engine, folder, ranks))
    ranks.agree("load_checkpoint_state()", error=error)
    states, error = ranks.attempt(lambda: _restore_engine(engine, folder, tag))
    ranks.agree("load_checkpoint() of DeepSpeed", error=error)
    client.load_state_dict({key: value for key, value in states.items() if key not in _OTHER_KEYS})
    outcomes = [Restored("weights", "restored"), Restored("optimizer", "restored")]
    if engine.lr_scheduler is not None:
        outcomes.append(Restored("scheduler", "restored"))
    for key in _EXPECTED:
        if key in client:
            outcomes.append(Restored(key, "restored"))
        else:
            outcomes.append(Restored(key, *_ABSENT))
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
    DeepSpeed writes the files; under ZeRO-1 and -2 it stores the client state of rank 0 only. The
    write is not atomic: `latest` is written last.
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
    """Return the tag of the checkpoint in `folder`.

    Raises LoadError if the checkpoint does not fit; each file is compared by one rank.
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
    """Name the settings and shapes in which the engine differs from the stored one."""
    count, is_zero = engine.seq_dp_world_size, engine.zero_optimization()
    with damaged_input(model_file):
        shapes = {}
        for group in stored["param_shapes"] or ():
            for name, shape in group.items():
                shapes[name] = tuple(shape)
        settings: dict[str, tuple[Any, Any]] = {
            "ranks": (stored["dp_world_size"], count),
            "ZeRO-3": (
                model_file.startswith("zero_pp_rank"),
                engine.zero_optimization_partition_weights(),
            ),
            "files of ZeRO's optimizer": (len(optimizer_files), count if is_zero else 0),
            "of bfloat16": (
                any(name.startswith("bf16_") for name in optimizer_files),
                is_zero and engine.bfloat16_enabled(),
            ),
            "a scheduler": (stored["lr_scheduler"] is not None, engine.lr_scheduler is not None),
            "training_step": ("training_step" in stored, True),
        }
    live = {name: source.shape for name, source in ModelTensors(engine).sources().items()}
    for name, shape in shapes.items():
        settings[name] = (shape, live.get(name))
    problems = []
    for name, (saved, current) in settings.items():
        if saved != current:
            problems.append(f"{name}: {saved} in the folder, {current} here")
    return problems


def _step_folder(place: Place) -> Place | None:
    """Return the folder with the ranks' files: `place`, or the one that its file `latest` names.

    Returns None if there is no such folder.
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
    """Let DeepSpeed restore the engine.

    Returns the model-states file, with the client state, without its weights.
    """
    read: dict[str, Any] = {}

    def load(path: str, map_location: Any = None) -> Any:
        value = _read_states(Path(path), getattr(engine.optimizer, "loss_scaler", None))
        if path.endswith(_MODEL_STATES):
            read.update(value)
            read.pop("module", None)
        return value

    with _with_attributes(engine, checkpoint_engine=SimpleNamespace(load=load), mpu=None):
        engine.load_checkpoint(str(folder), tag=tag)
    return read


def _read_states(path: Path, scaler: Any, *, checked: bool = False) -> Any:
    """Read the states in a file of DeepSpeed; `checked` compares its checksums.

    A loss scaler in the file becomes a copy of `scaler` with the file's numbers.
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
        return Restored("rng", *_ABSENT)
    if stored.get("rank") != rank:
        return Restored(
            "rng", "absent", "the folder has rank 0's alone; this rank goes on with those it has"
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
    problems = generator_problems(generators) or restore_generators(generators)
    return Restored("rng", "failed" if problems else "restored", "; ".join(problems))


@contextmanager
def _with_attributes(engine: Any, **values: Any) -> Iterator[None]:
    """Set attributes of the engine in the block.

    `mpu` is for sequence parallelism; open-instruct unsets it as well.
    """
    before = {name: getattr(engine, name) for name in values}
    vars(engine).update(values)
    try:
        yield
    finally:
        vars(engine).update(before)
