"""GET / and the files of the page."""

from http import HTTPStatus

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server.page.files import INDEX, PageFile, read_files
from server.protocol.server_state import Entrance

PREFIX = "/page/"


class PageRoute:
    """Everybody may have them: the files know nothing of what is served. Raises OSError if they are not there."""

    def __init__(self, *, with_page: bool) -> None:
        self.files = read_files() if with_page else {}
        self.paths = [PREFIX + name for name in self.files if name != INDEX]

    async def entrance(self, request: Request) -> Response:
        """The page for browsers; other clients, which want to see that somebody is there, get a few words."""
        headers = {"vary": "Accept"}
        if INDEX in self.files and "text/html" in request.headers.get("accept", ""):
            return _answer(request, self.files[INDEX], headers)
        return Response(msgspec.json.encode(Entrance()), headers=headers, media_type="application/json")

    async def file(self, request: Request) -> Response:
        """One of `paths`."""
        return _answer(request, self.files[request.url.path.removeprefix(PREFIX)], {})


def _answer(request: Request, file: PageFile, headers: dict[str, str]) -> Response:
    headers = {**file.headers, **headers}
    known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if headers["etag"] in known or "*" in known:
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    return Response(file.content, headers={**headers, "content-type": file.media_type})
