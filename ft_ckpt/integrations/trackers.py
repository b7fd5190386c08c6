"""Reports saves to experiment trackers, by functions for `CheckpointSaver(on_saved=...)`.

    CheckpointSaver(accelerator, "runs/sft", on_saved=[log_to_accelerate(accelerator),
    log_to_wandb(run)])

The functions are called on rank 0 after each save is committed. A tracker is imported on first use.
"""

from collections.abc import Callable
from typing import Any

from ft_ckpt.checkpoint import open_checkpoint
from ft_ckpt.checkpoint.catalog import best
from ft_ckpt.checkpoint.manifest import Manifest, load_manifest
from ft_ckpt.errors import ConfigError
from ft_ckpt.extensions.transfer.endpoints import weights_manifest
from ft_ckpt.saving.planning import SaveReport
from ft_ckpt.storage.places import Place, local_folder

__all__ = [
    "checkpoint_values",
    "log_to_accelerate",
    "log_to_mlflow",
    "log_to_trackio",
    "log_to_wandb",
]


def checkpoint_values(report: SaveReport, prefix: str = "checkpoint/") -> dict[str, float]:
    """Return the values of a save for a tracker: "seconds", "bytes", "tensors", and "is_best".

    "is_best" is 1 if the checkpoint is the best of its run so far, else 0. The value is absent if
    the run does not rank its checkpoints by a metric.
    """
    values: dict[str, float] = {
        "seconds": report.seconds,
        "bytes": report.bytes,
        "tensors": report.tensors,
    }
    is_best = _is_best(report)
    if is_best is not None:
        values["is_best"] = float(is_best)
    return {f"{prefix}{name}": value for name, value in values.items()}


def log_to_accelerate(
    accelerator: Any, prefix: str = "checkpoint/"
) -> Callable[[SaveReport], None]:
    """Log the values of each save to the trackers that `accelerator.init_trackers` has started."""

    def log_values(report: SaveReport) -> None:
        accelerator.log(checkpoint_values(report, prefix), step=report.step)

    return log_values


def log_to_trackio(prefix: str = "checkpoint/") -> Callable[[SaveReport], None]:
    """Log the values of each save to the run that `trackio.init` has started."""

    def log_values(report: SaveReport) -> None:
        import trackio

        trackio.log(checkpoint_values(report, prefix), step=report.step)

    return log_values


def log_to_wandb(
    run: Any = None, name: str | None = None, *, state: bool = False, upload: bool = True
) -> Callable[[SaveReport], None]:
    """Log each save as a version of a W&B artifact of the type "model".

    `run` defaults to the run that `wandb.init` has started. The `name` of the artifact defaults to
    "checkpoint-" and the id of the run. With `state` the training state is included. Without
    `upload` the artifact only refers to the folder. Aliases are "latest", such as "step-500", and
    "best" for the best checkpoint of the run. Files are compared with their digests before they are
    uploaded.
    """

    def log_artifact(report: SaveReport) -> None:
        import wandb

        target = run if run is not None else wandb.run
        if target is None:
            raise ConfigError(
                "no W&B run is active; call wandb.init() before the first save, or pass a run"
            )

        with open_checkpoint(report.place) as checkpoint:
            metadata = _artifact_metadata(report, checkpoint.manifest)
            artifact_name = name or f"checkpoint-{target.id}"
            artifact = wandb.Artifact(artifact_name, type="model", metadata=metadata)
            if upload:
                paths = _paths_of(checkpoint.manifest, state=state)
                checkpoint.refuse_damaged(paths)
                with local_folder(Place(checkpoint.store), paths.__contains__) as folder:
                    for path in paths:
                        artifact.add_file(str(folder / path), name=path)
            else:
                location = report.path
                url = location if isinstance(location, str) else location.absolute().as_uri()
                artifact.add_reference(url, checksum=False)

            aliases = ["latest"]
            if report.step is not None:
                aliases.append(f"step-{report.step}")
            if _is_best(report):
                aliases.append("best")
            target.log_artifact(artifact, aliases=aliases)

    return log_artifact


def log_to_mlflow(
    run_id: str | None = None, folder: str = "checkpoints", *, state: bool = False
) -> Callable[[SaveReport], None]:
    """Log the values of each save to MLflow, and its files as artifacts.

    The artifacts are in `folder`, in a folder with the name of the checkpoint. `run_id` defaults to
    the run that `mlflow.start_run` has started. With `state` the training state is included. Files
    are compared with their digests first.
    """

    def log_files(report: SaveReport) -> None:
        import mlflow

        active = mlflow.active_run()
        mlflow_run = run_id or (None if active is None else active.info.run_id)
        if mlflow_run is None:
            raise ConfigError(
                "no MLflow run is active; call mlflow.start_run() before the first save"
            )

        values = checkpoint_values(report, "checkpoint_")
        mlflow.log_metrics(values, step=report.step, run_id=mlflow_run)
        with open_checkpoint(report.place) as checkpoint:
            paths = _paths_of(checkpoint.manifest, state=state)
            checkpoint.refuse_damaged(paths)
            with local_folder(Place(checkpoint.store), paths.__contains__) as files:
                for path in paths:
                    folders = (folder, report.place.basename, path.rpartition("/")[0])
                    artifact_path = "/".join(name for name in folders if name)
                    mlflow.log_artifact(
                        str(files / path), artifact_path=artifact_path, run_id=mlflow_run
                    )

    return log_files


def _is_best(report: SaveReport) -> bool | None:
    """Check whether the checkpoint is the best of its run.

    The metric is the first one by which the run ranks its checkpoints. Returns None if there is
    none.
    """
    rankings = list(load_manifest(report.place.folder).rankings.items())
    if not rankings:
        return None
    return best(Place(report.place.beside), rankings[0]) == report.path


def _paths_of(manifest: Manifest, *, state: bool) -> list[str]:
    logged = manifest if state else weights_manifest(manifest)
    return [file.path for file in logged.files]


def _artifact_metadata(report: SaveReport, manifest: Manifest) -> dict[str, Any]:
    return {
        "step": report.step,
        "kind": report.kind,
        "bytes": report.bytes,
        "run_id": manifest.run_id,
        "metrics": dict(manifest.metrics),
        "versions": dict(manifest.versions),
    }
