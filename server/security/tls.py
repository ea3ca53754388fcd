"""TLS: the server's certificate, and clients' certificates."""

import ssl
from pathlib import Path

from configs.errors import SettingsError
from configs.settings import ServerConfig


def server_context(config: ServerConfig) -> ssl.SSLContext | None:
    """None without a certificate. Raises `SettingsError` for files that cannot be used, or would be for nothing."""
    if config.ssl_certfile is None:
        for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs"):
            if getattr(config, name):
                raise SettingsError(f"--{name.replace('_', '-')} needs a certificate: give --ssl-certfile too")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load_certificate(context, config.ssl_certfile, config.ssl_keyfile)
    context.verify_mode = ssl.VerifyMode(config.ssl_cert_reqs)
    if config.ssl_ca_certs is not None:
        _load_authorities(context, config.ssl_ca_certs)
    elif config.ssl_cert_reqs:
        raise SettingsError("--ssl-cert-reqs needs --ssl-ca-certs, the certificates of those who sign clients'")
    return context


def _load_certificate(context: ssl.SSLContext, certificate: str, key: str | None) -> None:
    _check_file("ssl-certfile", certificate)
    if key is not None:
        _check_file("ssl-keyfile", key)
    files = f"--ssl-certfile {certificate}" + (f", --ssl-keyfile {key}" if key else "")
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except _Encrypted as error:
        raise SettingsError(f"{files}: the key is encrypted; `openssl pkey` writes it without") from error
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise SettingsError(f"{files}: the key belongs to another certificate") from error
        raise SettingsError(f"{files}: no certificate with its private key in PEM form") from error


def _load_authorities(context: ssl.SSLContext, file: str) -> None:
    _check_file("ssl-ca-certs", file)
    try:
        context.load_verify_locations(file)
    except ssl.SSLError as error:
        raise SettingsError(f"--ssl-ca-certs {file}: no certificates in PEM form") from error


def _check_file(flag: str, file: str) -> None:
    """`ssl` does not say which file it could not read."""
    try:
        with Path(file).open("rb"):
            pass
    except OSError as error:
        raise SettingsError(f"--{flag} {file}: {error.strerror}") from error


class _Encrypted(Exception):
    pass


def _no_password() -> str:
    """Instead of a question on the terminal, where a server may have none."""
    raise _Encrypted
