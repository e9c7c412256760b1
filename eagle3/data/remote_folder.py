"""A folder of an object store, through fsspec: list, read a stretch, put, delete; errors have names, and what may pass
is tried again.
"""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from eagle3.errors import Eagle3Error, ProblemsError, problem_error
from eagle3.files import is_url

PUSH_MARK = "push.json"
"""Object that says which store is being pushed; it goes when the manifest is there."""

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
_LOCAL = ("file", "local")
_WAITS = (1.0, 2.0, 4.0, 8.0)
_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "DefaultCredentialsError")
_VERSIONS = ("ETag", "etag", "generation", "blob_id", "md5Hash", "LastModified", "mtime", "created")
_CLIENT_ERRORS = (
    ("botocore.exceptions", "BotoCoreError"),
    ("aiohttp", "ClientError"),
    ("httpx", "HTTPError"),
    ("httpx2", "HTTPError"),
    ("gcsfs.retry", "HttpError"),
    ("google.auth.exceptions", "GoogleAuthError"),
)
_NO_CREDENTIALS = (
    "log in, or set what the client reads (for s3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a role)"
)
_NO_PERMISSION = "let these credentials list the bucket and read its objects (write, for a push)"
_CHECK = "check the URL, and the settings that the client reads (for s3: AWS_ENDPOINT_URL, a profile)"
_CHANGED = "nobody may change a store in use: start again, with the store as it is now"
Result = TypeVar("Result")


@dataclass(frozen=True)
class RemoteFile:
    """Size in bytes, and a text that differs between versions of an object (its ETag or generation)."""

    size: int
    version: str


class RemoteFolder:
    """One folder by its URL. One of the Hugging Face hub is read as of the commit that is the newest when it is opened.

    Args:
        url: e.g. `s3://bucket/folder`.

    Raises:
        ProblemsError: kinds `remote.protocol`, `remote.package`.
    """

    def __init__(self, url: str) -> None:
        if not is_url(url):
            raise problem_error(url, "remote.protocol", "is no URL", "give e.g. s3://bucket/folder")
        if "::" in url:
            fix = "give s3://, gs:// or hf://, without another URL in it"
            raise problem_error(url, "remote.protocol", "is a chain of URLs, which is not supported", fix)
        protocol, _, rest = url.partition(":")
        protocol = protocol.lower()
        host = rest.strip("/").split("/")[0]
        if ":" in host and "@" in host:  # the message does not repeat it
            hidden = f"{protocol}://...@{host.rpartition('@')[2]}"
            raise problem_error(hidden, "remote.protocol", "has a user's name and password in it", _NO_CREDENTIALS)
        if not host:
            raise problem_error(url, "remote.protocol", "names no bucket", "give e.g. s3://bucket/folder")
        self.url = f"{protocol}://{rest.strip('/')}"
        if protocol in _LOCAL:
            fix = f"give the plain path: /{rest.strip('/')}"
            raise problem_error(url, "remote.protocol", "is a local folder, which is read without a cache", fix)
        extra = _EXTRAS.get(protocol)
        try:
            options = {"use_listings_cache": False}
            self._fs, self._path = fsspec.core.url_to_fs(self.url, **options)
        except ImportError as error:
            fix = f"pip install 'eagle3[{extra}]'" if extra else "install the package that the message names"
            message = f"a package for {protocol}:// is not installed: {error}"
            raise problem_error(self.url, "remote.package", message, fix) from None
        except ValueError as error:
            fix = "give s3://, gs://, hf:// or a local folder"
            raise problem_error(self.url, "remote.protocol", str(error), fix) from None
        self._exact: dict[str, Any] = {}
        if protocol == "hf":
            self._path = self._try(self.url, lambda: _at_commit(self._fs, self._path, self.url))
            self._exact = {"cache_type": "none"}  # else each stretch is read with five megabytes that follow it

    def where(self, name: str) -> str:
        """The URL of a file in the folder."""
        return f"{self.url}/{name}"

    def list(self) -> dict[str, RemoteFile]:
        """Every file in it, by name, without those of its folders; empty if there is no such folder."""
        try:
            entries = self._try(self.url, lambda: self._fs.ls(self._path, detail=True))
        except ProblemsError as error:
            if error.problems[0].kind == "remote.missing" and not _is_no_bucket(error):
                return {}
            raise
        files = [entry for entry in entries if entry["type"] == "file"]
        return {entry["name"].rstrip("/").split("/")[-1]: _remote_file(entry) for entry in files}

    def look(self, name: str, where: str | None = None) -> RemoteFile:
        """Size and version of a file as it is now."""
        info = self._try(where or self.where(name), lambda: self._fs.info(f"{self._path}/{name}"))
        return _remote_file(info)

    def read(self, name: str, begin: int, end: int, where: str | None = None) -> bytes:
        """Bytes `begin` to `end` of a file.

        Args:
            where: what problems name; default: the file.

        Raises:
            ProblemsError: kinds `remote.*`; the file ends before, or the connection breaks again and again.
        """
        path, where = f"{self._path}/{name}", where or self.where(name)

        def stretch() -> bytes:
            data: bytes = self._fs.cat_file(path, start=begin, end=end, **self._exact)
            if len(data) != end - begin:
                raise OSError(errno.EPIPE, f"{len(data):,} of {end - begin:,} bytes came")
            return data

        return self._try(where, stretch) if end > begin else b""

    def read_all(self, name: str) -> bytes:
        """A small file."""
        return self._try(self.where(name), lambda: bytes(self._fs.cat_file(f"{self._path}/{name}")))

    def put(self, path: Path, name: str) -> None:
        """Uploads a file; under its name it is whole, or the one before, or absent."""
        self._try(self.where(name), lambda: self._fs.put_file(str(path), f"{self._path}/{name}"))

    def put_bytes(self, name: str, data: bytes, new: bool = False) -> None:
        """Uploads a small file.

        Args:
            new: refuse where there is one already, in one step where the store can do that (S3, GCS).
        """
        mode = {"mode": "create"} if new else {}
        self._try(self.where(name), lambda: self._fs.pipe_file(f"{self._path}/{name}", data, **mode))

    def delete(self, name: str) -> None:
        self._try(self.where(name), lambda: self._fs.rm_file(f"{self._path}/{name}"))

    def _try(self, where: str, action: Callable[[], Result]) -> Result:
        """The action's result; a failure that may pass is tried again, with growing waits."""
        for wait in (*_WAITS, None):
            try:
                return action()
            except Eagle3Error:
                raise
            except client_errors() as error:
                if problem := _lasting(where, error):
                    raise problem from error
                if wait is None:
                    message = f"failed {len(_WAITS) + 1} times: {_said(error)}"
                    fix = "check the network and the service; the same command goes on"
                    raise problem_error(where, "remote.connection", message, fix) from error
                time.sleep(wait)
        raise AssertionError("unreachable")


def changed(where: str, message: str) -> ProblemsError:
    """An object that is not the one that was there when the store was opened."""
    return problem_error(where, "remote.changed", message, _CHANGED)


def _at_commit(file_system: Any, path: str, url: str) -> str:
    """The path with its newest commit in it: what a commit holds never changes, and its file system keeps listings for
    as long as the process runs.
    """
    from huggingface_hub import HfApi

    place = file_system.resolve_path(path)
    if not hasattr(place, "repo_id"):
        fix = "give a repository: hf://datasets/NAME/REPOSITORY/folder"
        raise problem_error(url, "remote.protocol", "is a bucket of the hub, which is not supported", fix)
    api = HfApi(endpoint=file_system.endpoint, token=file_system.token)
    commit = api.repo_info(place.repo_id, repo_type=place.repo_type, revision=place.revision).sha
    kind = "" if place.repo_type == "model" else f"{place.repo_type}s/"
    return f"{kind}{place.repo_id}@{commit}/{place.path_in_repo}".rstrip("/")


def client_errors() -> tuple[type[BaseException], ...]:
    """What the clients that are loaded raise when a request fails."""
    loaded = [(sys.modules[module], name) for module, name in _CLIENT_ERRORS if module in sys.modules]
    return (OSError, TimeoutError, ValueError, *(getattr(module, name) for module, name in loaded))


def _lasting(where: str, error: BaseException) -> ProblemsError | None:
    """The problem, if trying again is of no use."""
    if isinstance(error, FileNotFoundError) or _status(error) == 404:
        fix = "check the URL; a store that was in use must stay where it is"
        return problem_error(where, "remote.missing", f"is not there: {_said(error)}", fix)
    if type(error).__name__ in _CREDENTIALS:
        return problem_error(where, "remote.credentials", f"no credentials: {_said(error)}", _NO_CREDENTIALS)
    if isinstance(error, PermissionError) or _status(error) in (401, 403):
        return problem_error(where, "remote.permission", f"is refused: {_said(error)}", _NO_PERMISSION)
    if isinstance(error, FileExistsError):
        fix = "another push is at work, or was killed: look at the URL, then run again"
        return problem_error(where, "remote.exists", "came into being meanwhile", fix)
    if isinstance(error, OSError) and error.errno == errno.EINVAL:
        fix = f"check the URL; {_CHANGED}"
        return problem_error(where, "remote.refused", f"the service refuses: {_said(error)}", fix)
    if isinstance(error, ValueError) or type(error).__name__ == "ParamValidationError":
        said = " ".join(_said(error).split())
        return problem_error(where, "remote.refused", f"the client refuses: {said}", _CHECK)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return problem_error(where, "disk.full", _said(error), "free space, then run the same command again")
    return None


def _status(error: BaseException) -> int | None:
    """The HTTP status that the clients of GCS and of the hub give."""
    status = getattr(error, "code", None) or getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _is_no_bucket(error: ProblemsError) -> bool:
    cause: Any = error.__cause__
    while cause is not None and not hasattr(cause, "response"):
        cause = cause.__cause__
    return cause is not None and cause.response.get("Error", {}).get("Code") == "NoSuchBucket"


def _remote_file(info: dict[str, Any]) -> RemoteFile:
    version = next((info[key] for key in _VERSIONS if info.get(key)), "")
    if isinstance(version, datetime):  # a listing may give seconds where the file alone has a date
        version = version.timestamp()
    return RemoteFile(int(info["size"] or 0), str(version).strip('"'))


def _said(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
