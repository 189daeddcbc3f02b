"""The page at ``/``: files of this package only."""

from __future__ import annotations

import hashlib
from importlib.resources import files

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

PAGE_PREFIX = "/page/"
"""Paths of the page's static files, which need no key."""

_MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}

_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    # Scripts cannot convert text to markup (Trusted Types).
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}

_HEADERS = {
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in _POLICY.items()),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    # A browser must not cache the page of an older version.
    "Cache-Control": "no-cache",
}


class _File:
    """A file of the page, with its media type and ETag."""

    def __init__(self, data: bytes, media_type: str) -> None:
        self._data, self._media_type = data, media_type
        self._headers = {**_HEADERS, "ETag": f'"{hashlib.sha256(data).hexdigest()[:32]}"'}

    def response(self, request: Request) -> Response:
        """Respond with the file, or 304 if it is unchanged."""
        known = request.headers.get("if-none-match", "")
        if self._headers["ETag"] in (tag.strip().removeprefix("W/") for tag in known.split(",")):
            return Response(status_code=304, headers=self._headers)
        return Response(self._data, headers=self._headers, media_type=self._media_type)


def page_routes() -> APIRouter:
    """Return the routes of the page and of its files, which are read once."""
    router = APIRouter(include_in_schema=False)
    found = {}
    for file in (files("hpu_duo.server") / "page").iterdir():
        if media_type := _MEDIA_TYPES.get(file.name.rpartition(".")[2]):
            found[file.name] = _File(file.read_bytes(), media_type)
    index = found.pop("index.html")

    @router.api_route("/", methods=["GET", "HEAD"])
    async def page(request: Request) -> Response:
        """The page."""
        return index.response(request)

    @router.api_route(PAGE_PREFIX + "{name}", methods=["GET", "HEAD"])
    async def page_file(name: str, request: Request) -> Response:
        """A file that the page needs."""
        if name not in found:
            raise HTTPException(404, f"expected a file of the page, got {name!r}")
        return found[name].response(request)

    return router
