"""Interfaces of what extensions do for a run: uploads, pushes, publishes, sessions of writers.

- An upload copies a checkpoint from the upload folder of a run (the setting `staging`) to its
  directory in a bucket.
- A push copies a checkpoint to the Hub or to another place.
- A publish makes inference servers load the weights.
- A writer is another process that hands in files for each checkpoint of the run.

The extensions are named by import strings, and imported when a saver uses them.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from ft_ckpt.extension_points import load_extension
from ft_ckpt.jobs import BackgroundJob, yield_to_training
from ft_ckpt.retention import Keep
from ft_ckpt.storage import Store
from ft_ckpt.storage.digests import FileRecord
from ft_ckpt.storage.places import Place

_UPLOADS = "ft_ckpt.extensions.transfer.sending.uploads:RunUploads"
_PUSH_OPTIONS = "ft_ckpt.extensions.transfer.endpoints.endpoints:PushOptions"
_BEGIN_PUSH = "ft_ckpt.extensions.transfer.sending.pushing:begin_push"
_WAIT_FOR_PUSHES = "ft_ckpt.extensions.transfer.sending.pushing:wait_for_pushes"
_WARN_OF_UNPUSHED = "ft_ckpt.extensions.transfer.sending.pushing:warn_of_unpushed"
_PUBLISHER = "ft_ckpt.extensions.rl.publishing.run_publishers:Publisher"
_SERVER_OPTIONS = "ft_ckpt.extensions.rl.engines.options:ServerOptions"
_OPEN_SESSION = "ft_ckpt.extensions.rl.writers.session:open_session"


@dataclass(frozen=True)
class UploadTerms:
    """What an upload must know of the run.

    Attributes:
        run_id: The id of the run.
        own_ids: The ids of the runs whose checkpoints of the same name are replaced.
        keep: The retention rules of the run.
        protect: Checkpoints that no rule deletes.
    """

    run_id: str
    own_ids: Collection[str]
    keep: Keep | None = None
    protect: tuple[Place, ...] = ()


class Uploads(Protocol):
    """Uploads checkpoints from the upload folder of a run to its directory in a bucket."""

    @property
    def deletion_lock(self) -> AbstractContextManager[Any]:
        """The lock to hold while checkpoints of the upload folder are deleted."""

    def covers(self, checkpoint: Place) -> bool:
        """Check whether the checkpoint is in the upload folder."""

    def begin_upload(self, checkpoint: Place, terms: UploadTerms) -> BackgroundJob[Any]:
        """Upload the checkpoint, and all that are not uploaded yet, in the background."""

    def begin_round(self, terms: UploadTerms) -> None:
        """Upload all checkpoints that the bucket lacks, in the background."""

    def finish(self, seconds: float | None = None) -> str:
        """Wait for the uploads, at most `seconds`. Returns a sentence on unfinished ones, or ""."""

    def warn_of_left(self) -> None:
        """Warn of the uploads that go on until the process ends."""


class RunPublisher(Protocol):
    """Publishes checkpoints to servers in the background.

    Attributes:
        version: The version that was published last.
        after_resume: What to publish after a resume: "resumed" is the checkpoint itself,
            "published" is the version that the servers had when it was saved.
    """

    version: str | None
    after_resume: str

    def begin(self, place: Place) -> BackgroundJob[Any]:
        """Publish the checkpoint at `place`."""

    def end(self, *, wait_for: bool) -> None:
        """Wait for all publishes, or only warn of those that have not ended yet."""


class WriterSession(Protocol):
    """A session with the writers of a run, on rank 0. Their files become part of checkpoints."""

    @property
    def token(self) -> str:
        """A text that distinguishes this session from other sessions of the run."""

    def ask(self, step: int) -> None:
        """Ask the writers for their files of this step."""

    def collect(self, step: int, stage: Store) -> tuple[list[FileRecord], list[str]]:
        """Move the files of the writers into `stage`, the folder of an unfinished save.

        Returns the records of the files, and notes for the report.
        """

    def note_committed(self, checkpoint: Place) -> None:
        """Tell the writers that the checkpoint is committed."""

    def close(self) -> None:
        """End the session and its writers."""


def open_uploads(upload_folder: Place, directory: Place) -> Uploads:
    """Return the uploads from `upload_folder` to `directory`, which run at low priority."""
    uploads: Uploads = load_extension(_UPLOADS)(upload_folder, directory, yield_to_training)
    return uploads


def open_publisher(setting: Any) -> RunPublisher:
    """Open the publisher of `SaverConfig.publish`. Raises ConfigError for invalid options."""
    settings: dict[str, Any] = dict(setting) if isinstance(setting, Mapping) else {"url": setting}
    after_resume = settings.pop("after_resume", "resumed")
    options = load_extension(_SERVER_OPTIONS)(**settings)
    publisher: RunPublisher = load_extension(_PUBLISHER)(options, after_resume)
    return publisher


def begin_push(
    checkpoint: Place, destination: str | Place, base_id: str | None
) -> BackgroundJob[Any]:
    """Push the checkpoint in the background.

    `base_id` is the name on the Hub of the base model of an adapter.
    """
    options = load_extension(_PUSH_OPTIONS)(base_id=base_id)
    push: BackgroundJob[Any] = load_extension(_BEGIN_PUSH)(checkpoint, destination, options)
    return push


def end_pushes(pushes: Sequence[BackgroundJob[Any]], *, wait: bool) -> None:
    """Wait until all pushes have ended, or only warn of those that have not."""
    if pushes:
        load_extension(_WAIT_FOR_PUSHES if wait else _WARN_OF_UNPUSHED)(pushes)


def open_writer_session(
    run: Place,
    writers: Mapping[str, bool],
    start: Place | None,
    allow: Iterable[str],
    timeout_seconds: float,
) -> WriterSession:
    """Open a session for `writers`, who continue from the checkpoint `start`.

    The value of each writer says whether it is optional. Raises as `CheckpointSaver.invite` does.
    """
    session: WriterSession = load_extension(_OPEN_SESSION)(
        run, writers, start, allow, timeout_seconds
    )
    return session
