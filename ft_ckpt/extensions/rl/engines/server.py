"""A running inference server: the requests that every engine supports.

Only paths, names and plain JSON are sent: the endpoints for tensors take pickles. Sources: vLLM
0.22 to 0.32 (entrypoints/serve/dev/rlhf, entrypoints/serve/lora, docs/training/weight_checker.md),
SGLang (docs/advanced_features/sglang_for_rl.md and lora). vLLM has the endpoints for weights with
VLLM_SERVER_DEV_MODE=1, those for adapters with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and
--enable-lora.
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

    Every method raises EngineError when the server refuses or does not answer.
    """

    client: Client
    version: str

    engine: ClassVar[str]
    version_paths: ClassVar[
        tuple[str, ...]
    ]  # the first that answers has the version of the weights
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

        False if one of this name is loaded already.
        """

    @abstractmethod
    def unload_adapter(self, name: str) -> None:
        """Unload the adapter; no error if it is not loaded."""

    def weight_version(self) -> str | None:
        """Request the version of the weights; return None if the server reports none."""
        return weight_version_at(self.client, *self.version_paths)

    @abstractmethod
    def set_weight_version(self, version: str) -> None:
        """Set the version that the server reports."""

    def is_paused(self) -> bool:
        """Check whether generation is paused; return False if the server does not report it."""
        return False

    @abstractmethod
    def pause(self, in_flight: str) -> None:
        """Stop generation; `in_flight` requests: "wait", "keep" or "abort"."""

    @abstractmethod
    def resume(self) -> None:
        """Resume generation; no error if it is not paused."""

    @abstractmethod
    def load_weights(self, path: str) -> None:
        """Load full weights in place from the folder `path` on the server; then drop all caches."""

    @abstractmethod
    def drop_caches(self) -> None:
        """Drop the cached states of earlier prompts, if the server has an endpoint for it."""

    def digests(self) -> Mapping[str, str] | None:
        """Request a digest of each parameter by name, with its ranks as prefix ("tp0:...").

        vLLM computes SHA-256, SGLang other digests. Returns None if the server has no such
        endpoint, an empty mapping if it is paused and does not compute digests now.
        """
        answer = self.client.post(self.digests_path, {"action": "checksum"})
        return digests_of(self.client, answer)

    def _post(
        self,
        path: str,
        action: str,
        body: Mapping[str, Any] | None = None,
        passes: Callable[[Answer], bool] = lambda _: False,
        **query: str,
    ) -> Answer:
        """Return the answer to a request that `action` names in errors.

        Raises EngineError for a refusal, unless the answer `passes`.
        """
        answer = self.client.post(path, body, **query)
        if not passes(answer):
            self._refuse_failure(answer, path, action)
        return answer

    def _refuse_failure(self, answer: Answer, path: str, action: str) -> None:
        self.client.expect(answer, action)
