"""Ollama's API, which is all of /api/."""

from server.ollama import catalog, chat, embed

ROUTERS = (chat.router, embed.router, catalog.router)
