"""Makes the clients of object stores, with our defaults below what variables and callers say."""

import os
from datetime import timedelta
from typing import Any

from obstore import exceptions
from obstore.store import MemoryStore, from_url

from ft_ckpt.errors import ConfigError
from ft_ckpt.messages import clean_causes
from ft_ckpt.storage.object_errors import client_reason

_VARIABLES = {"s3": "AWS", "s3a": "AWS", "gs": "GOOGLE"}  # what those of a scheme begin with; all others are Azure's
_CLIENT_SETTINGS = ("allow_http", "allow_invalid_certificates", "connect_timeout", "proxy_url", "timeout", "user_agent")
_TIMEOUT = "3m"  # of one request, by the client's own clock: a part of an upload may take minutes on a slow line
_RETRIES = {"retry_timeout": timedelta(minutes=30)}  # ten tries; some of them may have got no answer in their time


def make_client(url: str, **options: Any) -> Any:
    """The client of the bucket `url`; `options` are those of `obstore.store.from_url`. Raises ConfigError.

    memory://NAME is a store in the memory of this process.
    """
    try:
        if url.startswith("memory://"):
            return MemoryStore(**options)
        return from_url(url, **client_options(url, **options))
    except (exceptions.BaseError, ValueError, TypeError) as error:
        clean_causes(error)
        raise ConfigError(f"{url}: no object store that can be used ({client_reason(error)})") from error


def client_options(url: str, **options: Any) -> dict[str, Any]:
    """Our defaults, below what variables say, below `options`: the client takes each kind from one place only."""
    start = _VARIABLES.get(url.partition("://")[0].lower(), "AZURE")
    found = {name: os.environ.get(f"{start}_{name.upper()}") for name in _CLIENT_SETTINGS}
    said = {name: value for name, value in found.items() if value is not None}
    client = {"timeout": _TIMEOUT, **said, **options.get("client_options", {})}
    signed = {"unsigned_payload": True} if start == "AWS" and _uses_tls(options) else {}
    return {
        **signed,
        **options,
        "client_options": client,
        "retry_config": {**_RETRIES, **options.get("retry_config", {})},
    }


def _uses_tls(options: dict[str, Any]) -> bool:
    """Whether the line itself keeps what is sent whole, so that signing each body, too, would be work for nothing."""
    config = {**options, **options.get("config", {})}
    names = ("aws_endpoint_url", "aws_endpoint", "endpoint_url", "endpoint")
    given = [config[name] for name in names if name in config]
    given += [
        os.environ[name] for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT") if name in os.environ
    ]
    return not any(str(endpoint).startswith("http:") for endpoint in given)
