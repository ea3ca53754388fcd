"""The routes of the server, as its OpenAPI document tells them."""

from dataclasses import dataclass
from typing import Any

from configs.settings import ServerConfig
from server.app import create_app
from tests.server.fake_engine import FakeEngine

DOCUMENT: dict[str, Any] = create_app(FakeEngine(), ServerConfig(), "fake").openapi()


@dataclass(frozen=True)
class Described:
    method: str
    path: str
    operation: dict[str, Any]

    @property
    def body_fields(self) -> list[str]:
        """Of the JSON object that it takes; empty where it takes none."""
        if "requestBody" not in self.operation:
            return []
        schema = self.operation["requestBody"]["content"]["application/json"]["schema"]
        name = schema["$ref"].rpartition("/")[2]
        return [*DOCUMENT["components"]["schemas"][name]["properties"]]


ROUTES = [
    Described(method.upper(), path, operation)
    for path, operations in DOCUMENT["paths"].items()
    for method, operation in operations.items()
]
