"""All routes of the server: `create_app` registers them, and the OpenAPI document describes them."""

from configs.settings import ServerConfig
from server.operation import Operation
from server.protocol.answers import (
    RESPONSE_EVENTS,
    OllamaChatAnswer,
    OllamaGenerateAnswer,
)
from server.protocol.messages import CountTokensRequest, Message, MessagesRequest, TokenCount
from server.protocol.messages import Event as MessageEvent
from server.protocol.ollama import (
    EmbedRequest,
    EmbedResponse,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaModels,
    PullRequest,
    PullStatus,
    ShowRequest,
    ShowResponse,
    SingleEmbedding,
    SingleEmbeddingRequest,
    Version,
)
from server.protocol.queries import InputItemsQuery, RetrieveQuery
from server.protocol.response_items import ItemList
from server.protocol.responses import DeletedResponse, InputTokens, ResponsesRequest
from server.protocol.responses import Response as ResponseSnapshot
from server.routes.messages import CountTokensRoute, MessagesRoute
from server.routes.ollama import OllamaChatRoute, OllamaGenerateRoute
from server.routes.ollama_embed import embed, embed_prompts, single_embedding, single_prompt
from server.routes.ollama_models import PullRoute, ShowRoute, api_version, list_running, list_tags, refuse_changes
from server.routes.responses import ResponsesRoutes
from server.routes.whole import whole


def operations(config: ServerConfig) -> list[Operation]:
    return [
        *_generating(config),
        *_responses(config),
        *_ollama(config),
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


def _ollama(config: ServerConfig) -> list[Operation]:
    lines = "application/x-ndjson"
    return [
        Operation(
            "POST",
            "/api/chat",
            OllamaChatRoute(config),
            "Answer a chat, in Ollama's form",
            body=OllamaChatRequest,
            answers=(OllamaChatAnswer,),
            events=(OllamaChatAnswer,),
            events_type=lines,
        ),
        Operation(
            "POST",
            "/api/generate",
            OllamaGenerateRoute(config),
            "Answer a prompt, in Ollama's form",
            body=OllamaGenerateRequest,
            answers=(OllamaGenerateAnswer,),
            events=(OllamaGenerateAnswer,),
            events_type=lines,
        ),
        Operation(
            "POST",
            "/api/show",
            ShowRoute(config),
            "What the model is, in Ollama's form",
            body=ShowRequest,
            answers=(ShowResponse,),
        ),
        whole("/api/embed", EmbedRequest, embed_prompts, "Embed texts, in Ollama's form", EmbedResponse, config, embed),
        whole(
            "/api/embeddings",
            SingleEmbeddingRequest,
            single_prompt,
            "Embed a text, in Ollama's older form",
            SingleEmbedding,
            config,
            single_embedding,
        ),
        Operation(
            "POST",
            "/api/pull",
            PullRoute(config),
            "Whether the model is there, in Ollama's form",
            body=PullRequest,
            answers=(PullStatus,),
            events=(PullStatus,),
            events_type=lines,
        ),
        Operation(
            "POST", "/api/copy /api/create /api/push", refuse_changes, "Refused, with the reason", (), errors=(400,)
        ),
        Operation("DELETE", "/api/delete", refuse_changes, "Refused, with the reason", (), errors=(400,)),
        Operation("GET", "/api/tags", list_tags, "The served model, in Ollama's form", (OllamaModels,)),
        Operation("GET", "/api/ps", list_running, "The loaded model, in Ollama's form", (OllamaModels,)),
        Operation("GET", "/api/version", api_version, "The version of Ollama whose API this is", (Version,)),
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
