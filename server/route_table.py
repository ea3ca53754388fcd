"""All routes of the server: `create_app` registers them, and the OpenAPI document describes them."""

from configs.settings import ServerConfig
from server.operation import Operation
from server.protocol.answers import (
    RESPONSE_EVENTS,
)
from server.protocol.queries import InputItemsQuery, RetrieveQuery
from server.protocol.response_items import ItemList
from server.protocol.responses import DeletedResponse, InputTokens, ResponsesRequest
from server.protocol.responses import Response as ResponseSnapshot
from server.routes.responses import ResponsesRoutes


def operations(config: ServerConfig) -> list[Operation]:
    return [
        *_responses(config),
    ]


def _responses(config: ServerConfig) -> list[Operation]:
    routes, path = ResponsesRoutes(config), "/v1/responses/{response_id}"
    return [
        Operation(
            "POST",
            "/v1/responses",
            routes.create,
            "Answer a chat, in the form of OpenAI's newer API",
            body=ResponsesRequest,
            answers=(ResponseSnapshot,),
            events=RESPONSE_EVENTS,
        ),
        Operation(
            "POST",
            "/v1/responses/input_tokens",
            routes.input_tokens,
            "Count the tokens of a response's prompt",
            (InputTokens,),
            body=ResponsesRequest,
        ),
        Operation(
            "GET",
            path,
            routes.retrieve,
            "A stored response",
            query=RetrieveQuery,
            answers=(ResponseSnapshot,),
            events=RESPONSE_EVENTS,
            errors=(400, 404),
        ),
        Operation("DELETE", path, routes.delete, "Forget a response", (DeletedResponse,), errors=(404,)),
        Operation("POST", f"{path}/cancel", routes.cancel, "End a response", (ResponseSnapshot,), errors=(400, 404)),
        Operation(
            "GET",
            f"{path}/input_items",
            routes.input_items,
            "What a response answers",
            query=InputItemsQuery,
            answers=(ItemList,),
            errors=(400, 404),
        ),
    ]
