"""The endpoints of a server that tell whether it is ready without making it generate anything.

`/ready` (SGLang from 0.5.20) answers 503 until the warm-up is over. Before, there is `/health`, which is passive only
if the server was started with `SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0`; else nothing. `/model_info` and
`/server_info` say what is served. `/health` without that variable, and `/health_generate`, are never asked here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import httpx

from eagle3.errors import problem_error
from eagle3.serve.fetch import fetch, json_of
from eagle3.serve.launch.flags import FIRST_WITH_READY
from eagle3.wiring.version import Version

State = Literal["ready", "starting", "silent", "cannot_say"]
_SECONDS = httpx.Timeout(10.0, connect=5.0)
_WHOLE_SECONDS = 10.0
_STARTING = (502, 503, 504)


@dataclass(frozen=True)
class Answer:
    """What asking brought.

    Attributes:
        state: `silent`: nobody answers; `cannot_say`: this release has no passive endpoint for it.
        how: the endpoint that was asked.
        note: for a person.
    """

    state: State
    how: str = ""
    note: str = ""


class Endpoints:
    """Asks one server; closes its connections with `close`."""

    def __init__(
        self,
        url: str,
        version: str | None,
        passive_health: bool,
        api_key: str | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        if (fault := _address_fault(self.url)) is not None:
            raise problem_error(url, "start.url", f"is no address: {fault}", "write e.g. http://localhost:30000")
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._client = httpx.Client(base_url=self.url, headers=headers, timeout=_SECONDS, transport=transport)
        self._paths = ["/health"] if passive_health else []
        if version is None or Version(version) >= Version(FIRST_WITH_READY):
            self._paths.insert(0, "/ready")

    def close(self) -> None:
        self._client.close()

    def ask(self) -> Answer:
        """Asks once.

        Raises:
            ProblemsError: kinds `start.unauthorized`, `start.not_sglang`.
        """
        for path in list(self._paths):
            try:
                response = fetch(self._client, "GET", path, _WHOLE_SECONDS)
            except httpx.TimeoutException:
                return Answer("starting", path, f"{path} does not answer in time")
            except httpx.HTTPError as error:
                return Answer("silent", path, f"{self.url} is not reached yet: {_said(error)}")
            if response.status_code == 404:
                self._paths.remove(path)
                continue
            return self._read(path, response)
        return self._without_endpoint()

    def _read(self, path: str, response: httpx.Response) -> Answer:
        status = response.status_code
        if status == 200:
            return Answer("ready", path)
        if status in (401, 403):
            message = f"answers {status} to {path}"
            raise problem_error(self.url, "start.unauthorized", message, "give the server's API key: --api-key")
        note = "" if status in _STARTING else f"{path} answers {status}"
        return Answer("starting", path, note)

    def _without_endpoint(self) -> Answer:
        info = self._get("/model_info")
        if info is None:
            return Answer("silent", "/model_info", f"{self.url} is not reached yet")
        if info.status_code == 404:
            message = "has neither /ready nor /model_info"
            raise problem_error(self.url, "start.not_sglang", message, "give the address of an SGLang server")
        return Answer("cannot_say", "/model_info")

    def served(self) -> str:
        """The model that it serves.

        Raises:
            ProblemsError: kind `start.not_sglang`.
        """
        response = self._get("/model_info")
        info = _object(response)
        path = info.get("model_path")
        if not isinstance(path, str):
            said = "does not answer" if response is None else f"answers {response.status_code}"
            message = f"said that it is ready, but its /model_info {said} and names no model: another program's port?"
            raise problem_error(self.url, "start.not_sglang", message, "give the address of an SGLang server")
        return path

    def version(self) -> str | None:
        """The engine's version, as it says itself."""
        version = _object(self._get("/server_info")).get("version")
        return version if isinstance(version, str) else None

    def _get(self, path: str) -> httpx.Response | None:
        try:
            return fetch(self._client, "GET", path, _WHOLE_SECONDS)
        except httpx.HTTPError:
            return None


def _object(response: httpx.Response | None) -> dict[str, Any]:
    if response is None or response.status_code != 200:
        return {}
    value = json_of(response.text)
    return value if isinstance(value, dict) else {}


def _address_fault(url: str) -> str | None:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        return str(error)
    if parsed.scheme not in ("http", "https"):
        return "it does not begin with http:// or https://"
    return None if parsed.host and " " not in url and "%20" not in parsed.host else "it has no host"


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__
