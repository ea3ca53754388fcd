"""What tools gave, as text: a picture or a document among it must not end an agent's conversation."""

from typing import Any

from configs.errors import InvalidRequest, shown

TEXTS = ("text", "input_text", "output_text")
NOT_TEXT = {
    **dict.fromkeys(("image", "image_url", "input_image", "computer_screenshot"), "image"),
    **dict.fromkeys(("document", "file", "input_file"), "document"),
    **dict.fromkeys(("audio", "input_audio", "audio_url"), "audio"),
    **dict.fromkeys(("video", "input_video", "video_url"), "video"),
    **dict.fromkeys(("resource", "resource_link", "tool_reference", "container_upload"), "resource"),
}
"""Types of parts that a model of texts cannot read, and the word that the model reads in place of each."""


def result_text(content: Any, where: str, param: str, passed_over: list[str]) -> str:
    """The text, or the texts of all parts joined by line breaks.

    Parts that are no text leave a word in their place, and are added to `passed_over`. Raises `InvalidRequest` naming
    the part.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a string or a list of parts", param=param)
    return "\n".join(_text(part, f"{where}[{index}]", param, passed_over) for index, part in enumerate(content))


def _text(part: Any, where: str, param: str, passed_over: list[str]) -> str:
    given = part if isinstance(part, dict) else {}
    kind = str(given.get("type"))
    text = given.get("text") if kind in TEXTS else _inner_text(given)
    if isinstance(text, str):
        return text
    if kind not in NOT_TEXT:
        raise InvalidRequest(f"{where}: parts of type {shown(kind)} are not supported; only text", param=param)
    passed_over.append(f"{where} {kind}")
    return f"[{NOT_TEXT[kind]} left out: this model reads only text]"


def _inner_text(part: dict[str, Any]) -> str | None:
    """The text in Anthropic's search results, and in documents that hold theirs."""
    content, source = part.get("content"), part.get("source")
    if part.get("type") == "search_result" and isinstance(content, list):
        return "\n".join(str(one.get("text")) for one in content if isinstance(one, dict))
    if part.get("type") == "document" and isinstance(source, dict) and source.get("type") == "text":
        return str(source.get("data"))
    return None
