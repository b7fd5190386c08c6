"""Finds out which inference server answers, and refuses servers that cannot be published to."""

from ft_ckpt.errors import ConfigError
from ft_ckpt.extensions.rl.engines.client import Client
from ft_ckpt.extensions.rl.engines.server import Server
from ft_ckpt.extensions.rl.engines.server_answers import first_object, listed_models, version_at
from ft_ckpt.extensions.rl.engines.sglang import SGLang
from ft_ckpt.extensions.rl.engines.vllm import VLLM

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
# What to do instead of a publish, by "owned_by" in the server's list of models.
_REFUSED = {
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
# (path, a word in the response, advice) for servers without "owned_by".
_PROBES = (
    ("/api/version", "version", _OLLAMA),
    ("/info", "model_id", _TGI),
    ("/props", "chat_template", _LLAMA_CPP),
)


def connect(client: Client) -> Server:
    """Return the server at the client's address, identified by its responses.

    Raises EngineError if no server answers, or if the server refuses to list its models. Raises
    ConfigError for a server that cannot be published to.
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
