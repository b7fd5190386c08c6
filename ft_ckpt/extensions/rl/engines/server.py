"""The requests that a running inference server of every engine supports.

Only paths, names and plain JSON are sent. The endpoints that take tensors are not used, because
they take pickles.

vLLM has the endpoints for weights if VLLM_SERVER_DEV_MODE=1. It has those for adapters if
VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and with --enable-lora. Sources: vLLM 0.22 to 0.32
(entrypoints/serve/dev/rlhf, entrypoints/serve/lora, docs/training/weight_checker.md), SGLang
(docs/advanced_features/sglang_for_rl.md and lora).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ft_ckpt.extensions.rl.engines.client import Answer, Client
from ft_ckpt.extensions.rl.engines.server_answers import (
    Served,
    digests_of,
    served_models,
    weight_version_at,
)


@dataclass(frozen=True)
class Server(ABC):
    """One running server.

    Every method raises EngineError if the server refuses or does not answer.

    Attributes:
        client: The HTTP client of the server.
        version: The version of the engine.
        engine: The name of the engine.
        version_paths: Endpoints that may report the version of the weights. The first one counts
            that reports a version.
        digests_path: The endpoint that computes digests of the parameters.
    """

    client: Client
    version: str

    engine: ClassVar[str]
    version_paths: ClassVar[tuple[str, ...]]
    digests_path: ClassVar[str]

    def served(self) -> Served:
        """Request the models that the server lists."""
        return served_models(self.client)

    @abstractmethod
    def model_name(self, base: str, adapter: str) -> str:
        """Return the model name in requests to an adapter on the served `base`."""

    @abstractmethod
    def load_adapter(self, name: str, path: str) -> bool:
        """Load the adapter in the folder `path` on the server.

        Returns False if an adapter of this name is loaded already.
        """

    @abstractmethod
    def unload_adapter(self, name: str) -> None:
        """Unload the adapter. It is no error if it is not loaded."""

    def weight_version(self) -> str | None:
        """Request the version of the weights; return None if the server reports none."""
        return weight_version_at(self.client, *self.version_paths)

    @abstractmethod
    def set_weight_version(self, version: str) -> None:
        """Set the version that the server reports."""

    def is_paused(self) -> bool:
        """Check whether generation is paused. Returns False if the server does not report it."""
        return False

    @abstractmethod
    def pause(self, in_flight: str) -> None:
        """Stop generation.

        `in_flight` says what happens to running requests: "wait" for their end, "keep" them until
        generation resumes, or "abort" them.
        """

    @abstractmethod
    def resume(self) -> None:
        """Resume generation. It is no error if it is not paused."""

    @abstractmethod
    def load_weights(self, path: str) -> None:
        """Replace the weights by those in the folder `path` on the server, and drop all caches."""

    @abstractmethod
    def drop_caches(self) -> None:
        """Drop the cached states of earlier prompts if the server has an endpoint for this."""

    def digests(self) -> Mapping[str, str] | None:
        """Request the digest of each parameter, by name with its ranks as prefix.

        An example of a name is "tp0:model.norm.weight". vLLM computes SHA-256, and SGLang other
        digests. Returns None if the server has no such endpoint. Returns an empty mapping if the
        server is paused and does not compute digests now.
        """
        answer = self.client.post(self.digests_path, {"action": "checksum"})
        return digests_of(self.client, answer)

    def _post(
        self,
        path: str,
        action: str,
        body: Mapping[str, Any] | None = None,
        is_accepted: Callable[[Answer], bool] = lambda _: False,
        **query: str,
    ) -> Answer:
        """Send a request, and return the answer. `action` names the request in errors.

        Raises EngineError for a refusal, unless `is_accepted` returns True for it.
        """
        answer = self.client.post(path, body, **query)
        if not is_accepted(answer):
            self._refuse_failure(answer, path, action)
        return answer

    def _refuse_failure(self, answer: Answer, path: str, action: str) -> None:
        """Raise EngineError if the answer is a refusal."""
        self.client.expect(answer, action)
