"""Combines the options of a client of obstore: defaults, environment variables, and a caller's."""

import os
from datetime import timedelta
from typing import Any

# The prefix of the environment variables for each scheme. All other schemes are Azure's.
_VARIABLES = {"s3": "AWS", "s3a": "AWS", "gs": "GOOGLE"}
_CLIENT_SETTINGS = (
    "allow_http",
    "allow_invalid_certificates",
    "connect_timeout",
    "proxy_url",
    "timeout",
    "user_agent",
)
_ENDPOINT_OPTIONS = ("aws_endpoint_url", "aws_endpoint", "endpoint_url", "endpoint")
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
# The time limit of one request. A part of an upload may take minutes on a slow line.
_TIMEOUT = "3m"
# The time limit of all tries. There are ten, and some of them may time out.
_RETRIES = {"retry_timeout": timedelta(minutes=30)}


def client_options(url: str, **options: Any) -> dict[str, Any]:
    """Return the options for the client of the bucket `url`.

    Environment variables override defaults, and `options` override both. The client itself does not
    merge them.
    """
    prefix = _VARIABLES.get(url.partition("://")[0].lower(), "AZURE")
    client_settings = {"timeout": _TIMEOUT}
    for name in _CLIENT_SETTINGS:
        value = os.environ.get(f"{prefix}_{name.upper()}")
        if value is not None:
            client_settings[name] = value
    merged: dict[str, Any] = {}
    if prefix == "AWS" and _uses_tls(options):
        merged["unsigned_payload"] = True
    merged.update(options)
    merged["client_options"] = {**client_settings, **options.get("client_options", {})}
    merged["retry_config"] = {**_RETRIES, **options.get("retry_config", {})}
    return merged


def _uses_tls(options: dict[str, Any]) -> bool:
    """Check whether requests are sent by TLS, so that their bodies need no signature."""
    config = {**options, **options.get("config", {})}
    endpoints = [config[name] for name in _ENDPOINT_OPTIONS if name in config]
    endpoints += [os.environ[name] for name in _ENDPOINT_VARIABLES if name in os.environ]
    return not any(str(endpoint).startswith("http:") for endpoint in endpoints)
