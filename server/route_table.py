"""All routes of the server: `create_app` registers them, and the OpenAPI document describes them."""

from configs.settings import ServerConfig
from server.operation import Operation
from server.protocol.messages import CountTokensRequest, Message, MessagesRequest, TokenCount
from server.protocol.messages import Event as MessageEvent
from server.routes.messages import CountTokensRoute, MessagesRoute


def operations(config: ServerConfig) -> list[Operation]:
    return [
        *_generating(config),
        *_text(config),
    ]


def _generating(config: ServerConfig) -> list[Operation]:
    return [
        Operation(
            "POST",
            "/v1/messages",
            MessagesRoute(config),
            "Answer a chat, in Anthropic's form",
            body=MessagesRequest,
            answers=(Message,),
            events=(MessageEvent,),
        ),
    ]


def _text(config: ServerConfig) -> list[Operation]:
    return [
        Operation(
            "POST",
            "/v1/messages/count_tokens",
            CountTokensRoute(config),
            "Count the tokens of a chat's prompt, in Anthropic's form",
            body=CountTokensRequest,
            answers=(TokenCount,),
        ),
    ]
