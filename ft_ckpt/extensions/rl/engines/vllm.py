"""Sends requests to the endpoints of vLLM."""

from typing import ClassVar

from ft_ckpt.errors import EngineError
from ft_ckpt.extensions.rl.engines.client import Answer
from ft_ckpt.extensions.rl.engines.server import Server
from ft_ckpt.extensions.rl.engines.server_answers import is_object, says_loaded


class VLLM(Server):
    """A server of vLLM."""

    engine: ClassVar[str] = "vLLM"
    version_paths: ClassVar[tuple[str, ...]] = ("/weight_info",)
    digests_path: ClassVar[str] = "/weight_checker"

    def model_name(self, base: str, adapter: str) -> str:
        return adapter

    def load_adapter(self, name: str, path: str) -> bool:
        # "load_inplace" is not used: it reads the disk at each step, and a name that is used again
        # answers from the old cache.
        body = {"lora_name": name, "lora_path": path}
        answer = self._post(
            "/v1/load_lora_adapter", f"adapter {name!r} from {path}", body, is_accepted=says_loaded
        )
        return answer.is_success

    def unload_adapter(self, name: str) -> None:
        answer = self.client.post("/v1/unload_lora_adapter", {"lora_name": name})
        if answer.status != 404:
            self.client.expect(answer, f"unloading adapter {name!r}")

    def set_weight_version(self, version: str) -> None:
        self._post("/update_weight_version", "its version", {"new_version": version})

    def is_paused(self) -> bool:
        answer = self.client.get("/is_paused")
        if not answer.is_absent:
            self.client.expect(answer, "whether it is paused")
        return is_object(answer) and answer.document.get("is_paused") is True

    def pause(self, in_flight: str) -> None:
        self._post("/pause", "pausing", mode=in_flight)

    def resume(self) -> None:
        answer = self.client.post("/resume")
        # A server without these endpoints cannot have been paused.
        if not answer.is_absent or self.is_paused():
            self.client.expect(answer, "resuming")

    def load_weights(self, path: str) -> None:
        arguments = {"weights_path": path, "is_checkpoint_format": True}
        self._post(
            "/collective_rpc",
            f"weights from {path}",
            {"method": "reload_weights", "kwargs": arguments},
        )
        self.drop_caches()

    def drop_caches(self) -> None:
        # The cached blocks of requests that a pause has kept are dropped and recomputed, too.
        for path in ("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"):
            answer = self.client.post(path, reset_running_requests="true")
            if not answer.is_absent:  # versions differ in these endpoints
                self.client.expect(answer, f"dropping its caches ({path})")
            if is_object(answer) and answer.document.get("success") is False:
                raise EngineError(
                    f"{self.client.url}: {path}: not dropped; it would answer from the old weights"
                )

    def _refuse_failure(self, answer: Answer, path: str, action: str) -> None:
        if answer.status == 404 and answer.document in (None, {"detail": "Not Found"}):
            raise EngineError(
                f"{self.client.url}: {action}: it has no {path}; start vLLM with --enable-lora and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True for adapters, with "
                "VLLM_SERVER_DEV_MODE=1 for weights"
            )
        super()._refuse_failure(answer, path, action)
