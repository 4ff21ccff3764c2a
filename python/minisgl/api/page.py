"""The page at `/`, and its part about the API at `/docs`: one static file that talks only to this server."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_PAGE: Final = Path(__file__).with_name("page.html")


def _hash_source(page: str, tag: str) -> str:
    """Return the Content-Security-Policy source that allows only the page's own inline `tag`."""
    inside = page.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
    assert inside, f"page.html has no <{tag}>"
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"


def content_security_policy(page: str) -> str:
    """Return a policy that allows only the page's own style and script, and requests to its server."""
    policy = {
        "default-src": "'none'",
        "style-src": _hash_source(page, "style"),
        "script-src": _hash_source(page, "script"),
        "connect-src": "'self'",
        "img-src": "data:",  # the icon
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",  # users type an API key here: no other site may frame the page
        "require-trusted-types-for": "'script'",  # the browser itself refuses to turn text into markup
    }
    return "; ".join(f"{name} {value}" for name, value in policy.items())


def page_routes() -> list[Route]:
    """Return the routes of the page, which has no secrets and needs no key (see `gate.OPEN_PATHS`)."""
    page = _PAGE.read_text(encoding="utf-8")
    headers = {
        "content-security-policy": content_security_policy(page),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",  # or an old page could meet the API of an updated server
    }
    body = page.encode()

    async def root(_: Request) -> Response:
        return Response(body, headers=headers, media_type="text/html")

    return [Route(path, root) for path in ("/", "/docs")]
