"""Answers as they leave, where the routes put them together from parts: for the OpenAPI document."""

from server.protocol import response_events

RESPONSE_EVENTS = (
    response_events.ResponseEvent,
    response_events.ItemEvent,
    response_events.PartEvent,
    response_events.ReasoningDelta,
    response_events.ReasoningDone,
    response_events.TextDelta,
    response_events.TextDone,
    response_events.ArgumentsDelta,
    response_events.ArgumentsDone,
    response_events.ErrorEvent,
)
