"""Options of obstore's clients: defaults, environment variables, and what a caller sets."""

import os
from datetime import timedelta
from typing import Any

# prefix of the environment variables of each scheme; Azure's for all others
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
# of one request, by the client's own clock: a part of an upload may take minutes on a slow line
_TIMEOUT = "3m"
_RETRIES = {"retry_timeout": timedelta(minutes=30)}  # ten tries, some of which may time out


def client_options(url: str, **options: Any) -> dict[str, Any]:
    """Combine defaults, environment variables and `options`; later ones override earlier ones.

    The client itself merges none of them.
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
    """Check whether the transport protects what is sent, so that bodies need no signature."""
    config = {**options, **options.get("config", {})}
    endpoints = [config[name] for name in _ENDPOINT_OPTIONS if name in config]
    endpoints += [os.environ[name] for name in _ENDPOINT_VARIABLES if name in os.environ]
    return not any(str(endpoint).startswith("http:") for endpoint in endpoints)
