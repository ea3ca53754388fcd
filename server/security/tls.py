"""TLS: what is wrong with the certificates that uvicorn loads, said before a model is loaded."""

import ssl
from pathlib import Path

from configs.errors import SettingsError
from configs.settings import ServerConfig


def check_certificates(config: ServerConfig) -> None:
    """Raises `SettingsError` for files that cannot be used, or would be for nothing."""
    certificate, key, authorities = config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs
    if certificate is None:
        for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs"):
            if getattr(config, name):
                raise SettingsError(f"--{name.replace('_', '-')} needs a certificate: give --ssl-certfile too")
        return
    if config.ssl_cert_reqs and authorities is None:
        raise SettingsError("--ssl-cert-reqs needs --ssl-ca-certs, the certificates of those who sign clients'")
    for flag, file in (("ssl-certfile", certificate), ("ssl-keyfile", key), ("ssl-ca-certs", authorities)):
        if file is not None:
            _check_readable(flag, file)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    files = f"--ssl-certfile {certificate}" + (f", --ssl-keyfile {key}" if key else "")
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except _Encrypted as error:
        raise SettingsError(f"{files}: the key is encrypted; `openssl pkey` writes it without") from error
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise SettingsError(f"{files}: the key belongs to another certificate") from error
        raise SettingsError(f"{files}: no certificate with its private key in PEM form") from error
    try:
        if authorities is not None:
            context.load_verify_locations(authorities)
    except ssl.SSLError as error:
        raise SettingsError(f"--ssl-ca-certs {authorities}: no certificates in PEM form") from error


def _check_readable(flag: str, file: str) -> None:
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
