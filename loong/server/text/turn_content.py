"""The content of a turn as chat templates take it: a text, or a list of parts with texts."""

from typing import TypeAlias

Content: TypeAlias = str | list[dict[str, str]]


def text_of(content: object) -> str:
    """Return a content as one text. Line breaks join its parts."""
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return str(content)


def like(content: object, text: str) -> Content:
    """Return a text in the form that a content has."""
    return _part(text) if isinstance(content, list) else text


def in_other_form(content: object) -> Content:
    """Return parts as one text, and a text as a part."""
    return text_of(content) if isinstance(content, list) else _part(text_of(content))


def last_text(content: object) -> str:
    """Return a text, or that of the last part."""
    return text_of(content[-1:] if isinstance(content, list) else content)


def followed_by(content: object, text: str) -> Content:
    """Return a content with a text at its end."""
    if not isinstance(content, list):
        return f"{content}{text}"
    return [*content[:-1], *_part(last_text(content) + text)]


def _part(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]
