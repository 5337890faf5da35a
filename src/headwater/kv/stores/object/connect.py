"""From options to an obstore client. Credentials are obstore's affair: environment, web identity, instance or workload
identity; a named AWS profile needs boto3."""

import os
from datetime import timedelta
from typing import Any

from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from headwater.errors import ConfigError
from headwater.kv.stores.object.options import SETTING, ObjectOptions


def connect(options: ObjectOptions) -> Any:
    """Opens no connection yet. Raises `ConfigError`."""
    shared: dict[str, Any] = {
        "prefix": options.prefix or None,
        "client_options": _client(options),
        "retry_config": {
            "max_retries": options.retries,
            "retry_timeout": timedelta(seconds=options.request_timeout_s),
            "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=2)},
        },
    }
    try:
        match options.scheme:
            case "s3":
                return S3Store(options.bucket, **shared | _s3(options))
            case "az":
                return AzureStore(
                    options.bucket, **shared | _set(endpoint=options.endpoint, account_name=options.account)
                )
            case _:
                return GCSStore(options.bucket, **shared | _set(base_url=options.endpoint))
    except (BaseError, ValueError, OSError) as error:
        raise ConfigError(
            f"{SETTING} {options.url}: {str(error).splitlines()[0]}",
            hint="credentials and region come from the environment, as for the cloud's own tools",
        ) from None


def _client(options: ObjectOptions) -> dict[str, Any]:
    return {
        "allow_http": options.endpoint.startswith("http://"),
        "connect_timeout": timedelta(seconds=options.connect_timeout_s),
        "read_timeout": timedelta(seconds=options.stall_timeout_s),
        "timeout": timedelta(seconds=options.request_timeout_s),
    }


def _s3(options: ObjectOptions) -> dict[str, Any]:
    settings: dict[str, Any] = _set(endpoint=options.endpoint, region=options.region)
    profile = os.environ.get("AWS_PROFILE")
    if profile and not os.environ.get("AWS_ACCESS_KEY_ID"):
        settings["credential_provider"] = _profile(profile)
    return settings


def _profile(name: str) -> Any:
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        raise ConfigError(
            f"{SETTING}: AWS_PROFILE is {name!r}, and reading profiles needs boto3",
            hint="pip install boto3, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        ) from None
    return Boto3CredentialProvider()


def _set(**settings: str) -> dict[str, str]:
    return {name: value for name, value in settings.items() if value}
