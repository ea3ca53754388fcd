"""What is checked of security before a model is loaded, which may take long."""

from configs.settings import ServerConfig
from server.security.hosts import is_reachable
from server.security.keys import read_keys
from server.security.tls import check_certificates


def check_security(config: ServerConfig) -> str | None:
    """A warning, where there is reason for one. Raises `SettingsError` for keys and certificates that are of no use."""
    check_certificates(config)
    if read_keys(config) or config.uds or not is_reachable(config.host):
        return None
    return (
        f"everybody who can reach {config.host} can use this server, as it has no API key:"
        " --api-key-file or OCTAVO_API_KEY sets one"
    )
