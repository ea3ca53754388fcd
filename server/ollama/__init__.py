"""Ollama's API, which is all of /api/."""
