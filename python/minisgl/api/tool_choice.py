"""`tool_choice`: whether the model may, must or must not call a tool, and which."""

from __future__ import annotations

from typing import Any

from minisgl.api.protocol import ChatCompletionRequest
from minisgl.errors import RequestError


def forced_functions(request: ChatCompletionRequest) -> list[dict[str, Any]] | None:
    """The functions of which one must be called; None = as the model likes, or none at all.

    Raises `RequestError` (400) for a choice that there is not.
    """
    choice = request.tool_choice
    if choice in (None, "auto", "none"):
        return None
    functions = [tool["function"] for tool in request.tools or ()]
    if choice == "required":
        wanted = functions
    elif isinstance(choice, dict) and choice.get("type") == "function" and isinstance(choice.get("function"), dict):
        wanted = [f for f in functions if f["name"] == choice["function"].get("name")]
    else:
        raise RequestError(
            'tool_choice must be "auto", "none", "required" or {"type": "function", "function": {"name": ...}}',
            param="tool_choice",
            code="unsupported_value",
        )
    if not wanted:
        raise RequestError("tool_choice names a tool that is not in tools", param="tool_choice")
    return wanted
