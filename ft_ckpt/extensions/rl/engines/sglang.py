"""Sends requests to the endpoints of SGLang, which some other servers have as well."""

from collections.abc import Mapping
from typing import ClassVar

from ft_ckpt.errors import EngineError
from ft_ckpt.extensions.rl.engines.client import Answer
from ft_ckpt.extensions.rl.engines.server import Server
from ft_ckpt.extensions.rl.engines.server_answers import digests_of, says_loaded, says_not_loaded

# What SGLang does for each `in_flight`. Retracted requests are recomputed from their tokens. The
# mode "in_place" would keep the cache of the old weights.
_MODES = {"wait": "retract", "keep": "retract", "abort": "abort"}


class SGLang(Server):
    """A server of SGLang, or one with its endpoints."""

    engine: ClassVar[str] = "SGLang"
    version_paths: ClassVar[tuple[str, ...]] = (
        "/get_weight_version",
        "/model_info",
        "/get_model_info",
    )
    digests_path: ClassVar[str] = "/weights_checker"

    def model_name(self, base: str, adapter: str) -> str:
        return f"{base}:{adapter}"  # for a name without a colon, the base model would answer

    def load_adapter(self, name: str, path: str) -> bool:
        body = {"lora_name": name, "lora_path": path}
        answer = self._post(
            "/load_lora_adapter", f"adapter {name!r} from {path}", body, is_accepted=says_loaded
        )
        return not says_loaded(answer)

    def unload_adapter(self, name: str) -> None:
        # Requested even if the server does not list the adapter, because it may still be loaded.
        body = {"lora_name": name}
        self._post(
            "/unload_lora_adapter", f"unloading adapter {name!r}", body, is_accepted=says_not_loaded
        )

    def set_weight_version(self, version: str) -> None:
        body = {"new_version": version, "abort_all_requests": False}
        self._post("/update_weight_version", "its version", body)

    def pause(self, in_flight: str) -> None:
        self._post("/pause_generation", "pausing", {"mode": _MODES[in_flight]})

    def resume(self) -> None:
        self._post("/continue_generation", "resuming")

    def load_weights(self, path: str) -> None:
        body = {
            "model_path": path,
            "flush_cache": True,
            "abort_all_requests": False,
            "keep_pause": True,
        }
        self._post("/update_weights_from_disk", f"weights from {path}", body)

    def drop_caches(self) -> None:
        """Do nothing, because loading weights drops the caches.

        Each load of an adapter has caches of its own, even under a name that was used before.
        """

    def digests(self) -> Mapping[str, str] | None:
        answer = self.client.post(self.digests_path, {"action": "checksum"})
        if answer.status == 400:  # this version has no such action
            return None
        return digests_of(self.client, answer)

    def _refuse_failure(self, answer: Answer, path: str, action: str) -> None:
        document = self.client.expect(answer, action).document
        if isinstance(document, dict) and document.get("success") is False:
            raise EngineError(f"{self.client.url}: {action}: refused: {answer.quoted}")
