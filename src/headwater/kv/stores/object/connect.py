"""From options to an obstore client. Credentials are obstore's affair: environment, web identity, instance or workload
identity; a named AWS profile needs boto3."""

import os
from datetime import timedelta
from typing import Any, NamedTuple

from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from headwater.errors import ConfigError
from headwater.kv.stores.object.options import ObjectOptions


class Clients(NamedTuple):
    """Two for one bucket: a stalled read shows at once, while a write may take as long as its body takes to send."""

    reading: Any
    writing: Any


def connect(options: ObjectOptions) -> Clients:
    """Opens no connection yet. Raises `ConfigError`."""
    try:
        stall = {"read_timeout": timedelta(seconds=options.stall_timeout_s)}
        return Clients(_client(options, stall), _client(options, {}))
    except (BaseError, ValueError, OSError) as error:
        raise ConfigError(
            f"{options.setting} {options.url}: {str(error).splitlines()[0]}",
            hint="credentials and region come from the environment, as for the cloud's own tools",
        ) from None


def _client(options: ObjectOptions, timeouts: dict[str, Any]) -> Any:
    settings: dict[str, Any] = {
        "prefix": options.prefix or None,
        "client_options": {
            "allow_http": options.endpoint.startswith("http://"),
            "connect_timeout": timedelta(seconds=options.connect_timeout_s),
            "timeout": timedelta(seconds=options.request_timeout_s),
            **timeouts,
        },
        "retry_config": {
            "max_retries": options.retries,
            "retry_timeout": timedelta(seconds=options.request_timeout_s),
            "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=2)},
        },
    }
    match options.scheme:
        case "s3":
            return S3Store(options.bucket, **settings | _s3(options))
        case "az":
            account = _set(endpoint=options.endpoint, account_name=options.account)
            return AzureStore(options.bucket, **settings | account)
        case _:
            return GCSStore(options.bucket, **settings | _set(base_url=options.endpoint))


def _s3(options: ObjectOptions) -> dict[str, Any]:
    settings: dict[str, Any] = _set(endpoint=options.endpoint, region=options.region)
    # Under TLS hashing every body for its signature protects nothing more, and is two thirds of the cost of writing.
    settings["unsigned_payload"] = not options.endpoint.startswith("http://")
    profile = os.environ.get("AWS_PROFILE")
    if profile and not os.environ.get("AWS_ACCESS_KEY_ID"):
        settings["credential_provider"] = _profile(profile, options)
    return settings


def _profile(name: str, options: ObjectOptions) -> Any:
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        raise ConfigError(
            f"{options.setting}: AWS_PROFILE is {name!r}, and reading profiles needs boto3",
            hint="pip install boto3, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        ) from None
    return Boto3CredentialProvider()


def _set(**settings: str) -> dict[str, str]:
    return {name: value for name, value in settings.items() if value}
