"""POST /v1/responses, and what can be done with a stored response."""

from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Depends, Query
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from configs.errors import ContextLengthExceeded, InvalidRequest, shown
from server.bodies import BodyRoute, ParsedRequest
from server.chat import render, start_chat
from server.documented import streamed
from server.errors import error_statuses
from server.openai.responses.conversion import chat_of, first_response, namespaces_of, offered_tools, read_items
from server.openai.responses.events import ResponseObject, ResponseWriter, StreamEvent
from server.openai.responses.models import Item, ResponsesRequest
from server.openai.responses.store import ResponseStore, StoredResponse
from server.serving import Serving, ServingOf
from server.shortening import DROPPED, without_oldest
from server.sse import EventStream, until_disconnect
from server.structured import STRICT
