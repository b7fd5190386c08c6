"""The HTTP endpoints of inference servers that can be published to: vLLM, SGLang, and servers with
SGLang's endpoints.

Only paths, names and plain JSON are sent: the endpoints for tensors take pickles. Sources: vLLM
0.22 to 0.32 (entrypoints/serve/dev/rlhf, entrypoints/serve/lora, docs/training/weight_checker.md),
SGLang (docs/advanced_features/sglang_for_rl.md and lora). vLLM has the endpoints for weights with
VLLM_SERVER_DEV_MODE=1, those for adapters with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and
--enable-lora.
"""

import math
from collections.abc import Mapping
from typing import Protocol

from ft_ckpt.errors import ConfigError, EngineError
from ft_ckpt.extensions.rl.client import Client
from ft_ckpt.extensions.rl.server_answers import Served, first_object, listed_models, version_at
from ft_ckpt.extensions.rl.sglang import SGLang
from ft_ckpt.extensions.rl.vllm import VLLM

# token ids in every vocabulary
PROBE_PROMPTS = ((3, 5, 7, 11, 13), (2, 9, 4, 16, 8), (17, 6, 1, 10, 12))
_TOP = 5  # tokens whose log probabilities are compared; servers return 5 by default
_LLAMA_CPP = (
    "llama.cpp reads adapters and weights when it starts; convert a merged model to GGUF and "
    "start it again"
)
_OLLAMA = (
    "ollama makes models from GGUF files: merge the adapter, convert the result to GGUF, and "
    "`ollama create`"
)
_TGI = (
    "TGI reads adapters when it starts (LORA_ADAPTERS=name=path); start it again, or serve with "
    "vLLM or SGLang"
)
_REFUSED = {  # "owned_by" in its list of models: the advice
    "llamacpp": _LLAMA_CPP,
    "library": _OLLAMA,
    "lmdeploy": (
        "LMDeploy takes weights as serialised tensors only, from its own machine; serve with "
        "vLLM or SGLang"
    ),
    "tensorrt_llm": (
        "TensorRT-LLM takes no new weights over HTTP; adapters are named per "
        "request; start it again"
    ),
}
_PROBES = (
    ("/api/version", "version", _OLLAMA),
    ("/info", "model_id", _TGI),
    ("/props", "chat_template", _LLAMA_CPP),
)


class Server(Protocol):
    """One running server.

    Every method raises EngineError when the server refuses or does not answer.
    """

    @property
    def client(self) -> Client: ...

    @property
    def engine(self) -> str: ...  # "vLLM" or "SGLang"

    @property
    def version(self) -> str: ...

    def served(self) -> Served:
        """The models it lists."""
        ...

    def model_name(self, base: str, adapter: str) -> str:
        """The model name in requests to an adapter on the served `base`."""
        ...

    def load_adapter(self, name: str, path: str) -> bool:
        """Load the adapter in the folder `path` on the server.

        False if one of this name is loaded already.
        """
        ...

    def unload_adapter(self, name: str) -> None:
        """Unload the adapter; no error if it is not loaded."""
        ...

    def weight_version(self) -> str | None:
        """The version of the weights that the server reports; None if it reports none."""
        ...

    def set_weight_version(self, version: str) -> None:
        """Set the version that the server reports."""
        ...

    def is_paused(self) -> bool:
        """Whether generation is paused; False if the server does not report it."""
        ...

    def pause(self, in_flight: str) -> None:
        """Stop generation; `in_flight` requests: "wait", "keep" or "abort"."""
        ...

    def resume(self) -> None:
        """Resume generation; no error if it is not paused."""
        ...

    def load_weights(self, path: str) -> None:
        """Load full weights in place from the folder `path` on the server; then drop all caches."""
        ...

    def drop_caches(self) -> None:
        """Drop the cached states of earlier prompts, if the server has an endpoint for it."""
        ...

    def digests(self) -> Mapping[str, str] | None:
        """A digest of each parameter by name, with its ranks as prefix ("tp0:..."): SHA-256 in
        vLLM, others in SGLang.

        None if the server has no such endpoint; empty if it is paused and does not compute them
        now.
        """
        ...


def connect(client: Client) -> Server:
    """The server at an address, identified by its responses.

    Raises EngineError if no server answers, or it refuses now; ConfigError for a server that cannot
    be published to.
    """
    models = client.get("/v1/models")
    if not models.is_absent:
        client.expect(models, "its list of models")
    owners = set()
    if models.is_success:
        owners = {str(model.get("owned_by", "")).lower() for model in listed_models(models)}
    for owner, advice in _REFUSED.items():
        if owner in owners:
            raise ConfigError(f"{client.url}: {advice}")
    if "vllm" in owners:
        return VLLM(client, version_at(client, "/version"))
    information = first_object(client, "/server_info", "/get_server_info")
    if "sglang" in owners or information is not None:
        return SGLang(client, version_at(client, information or "/server_info"))
    for path, word, advice in _PROBES:
        answer = client.get(path)
        if answer.is_success and word in answer.text.lower():
            raise ConfigError(f"{client.url}: {advice}")
    raise ConfigError(
        f"{client.url}: no server that can be published to answers there (/v1/models: "
        f"{models.quoted}); expected vLLM, SGLang or a server with SGLang's calls"
    )


def probe(server: Server, model: str) -> list[list[float]]:
    """The highest log probabilities of the first token after each of PROBE_PROMPTS, largest
    first.
    """
    answers = []
    for prompt in PROBE_PROMPTS:
        body = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": _TOP,
        }
        answer = server.client.expect(
            server.client.post("/v1/completions", body), f"a completion by {model!r}"
        )
        try:
            top = answer.document["choices"][0]["logprobs"]["top_logprobs"][0]
            numbers = sorted(map(float, top.values()), reverse=True)[:_TOP]
        except (KeyError, IndexError, TypeError, AttributeError, ValueError):
            numbers = [math.nan]
        if not all(map(math.isfinite, numbers)):  # every comparison with NaN passes
            raise EngineError(
                f"{server.client.url}: a completion by {model!r} has no finite log probabilities: "
                f"{answer.quoted}"
            )
        answers.append(numbers)
    return answers
