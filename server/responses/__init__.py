"""Responses of OpenAI's Responses API: how one grows, and where they are kept."""
