"""What an S3 server, or the way to it, meant by an error: which of our kinds it is."""

from __future__ import annotations

from typing import Any, NamedTuple

from training.checkpoint.store.base import NoSpace, NotFound
from training.errors import Invalid, RetomaError, Unavailable

# The client is rebuilt once for these: the provider chain may have newer credentials.
EXPIRED = frozenset(
    "ExpiredToken ExpiredTokenException RequestExpired InvalidToken TokenRefreshRequired InvalidAccessKeyId".split()
)
_NO_SPACE = frozenset(
    "QuotaExceeded InsufficientStorage InsufficientCapacity "
    "XMinioStorageFull XMinioAdminBucketQuotaExceeded".split()
)
_WRONG_REGION = frozenset(
    "PermanentRedirect AuthorizationHeaderMalformed IllegalLocationConstraintException".split()
)
_TRANSIENT = frozenset(
    "SlowDown Throttling RequestTimeout RequestLimitExceeded InternalError ServiceUnavailable OperationAborted "
    "BadDigest IncompleteBody XAmzContentSHA256Mismatch XAmzContentChecksumMismatch".split()
)
_NO_CREDENTIALS = frozenset(
    "NoCredentialsError PartialCredentialsError ProfileNotFound ConfigNotFound ConfigParseError "
    "UnauthorizedSSOTokenError SSOTokenLoadError TokenRetrievalError InvalidConfigError".split()
)
_NO_REQUEST = frozenset("ParamValidationError InvalidRegionError InvalidEndpointError ValueError".split())


class ConditionFailed(Exception):
    """412: If-None-Match found an object, or If-Match another one."""


class Conflict(Exception):
    """409: somebody else's conditional write was in flight. Whether the key is taken is not known."""


class OutOfRange(Exception):
    """416: the object ends before the first byte that was asked for."""


class UploadGone(Exception):
    """404: the multipart upload was aborted, or completed."""


class Answer(NamedTuple):
    """An error that a server answered with."""

    status: int
    code: str
    message: str

    def __str__(self) -> str:
        return " ".join(part for part in (str(self.status or ""), self.code, self.message) if part)


def answer_of(error: BaseException) -> Answer | None:
    """The server's answer behind an exception, or None if there was none."""
    for candidate in (error, error.__cause__):
        response = getattr(candidate, "response", None)
        if isinstance(response, dict) and isinstance(response.get("Error"), dict):
            told, about = response["Error"], response.get("ResponseMetadata", {})
            code = str(told.get("Code", ""))
            status = about.get("HTTPStatusCode") or (int(code) if code.isdecimal() else 0)
            return Answer(int(status), "" if code.isdecimal() else code, str(told.get("Message", "")))
    return None


def is_expired(error: BaseException) -> bool:
    """Whether newer credentials would help."""
    answer = answer_of(error)
    return answer is not None and answer.code in EXPIRED


def explain(error: Exception, doing: str, url: str, bucket: str, key: str | None) -> Exception:
    """The error of ours for one of botocore's, aiohttp's or the system's."""
    if isinstance(error, RetomaError | ConditionFailed | Conflict | OutOfRange | UploadGone):
        return error
    what = f"{doing} {key} in {url}" if key else f"{doing} {url}"
    answer = answer_of(error)
    if answer is not None:
        return _of_answer(answer, what, url, bucket, key)
    name = type(error).__name__
    if name in _NO_CREDENTIALS:
        return Invalid(
            f"{what}: {error}", hint="give credentials by AWS_ACCESS_KEY_ID, a profile or a role", key=key
        )
    if name in _NO_REQUEST:
        return Invalid(f"{what}: {error}", hint="check bucket, endpoint and region; see docs/s3.md", key=key)
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return Invalid(f"{what}: {error}", hint="set AWS_CA_BUNDLE to the file of the server's authority", key=key)
    return Unavailable(f"{what}: {_told(error)}", hint="is the store up, and is its endpoint right?", key=key)


def _of_answer(answer: Answer, what: str, url: str, bucket: str, key: str | None) -> Exception:
    status, code, _ = answer
    kinds: list[tuple[bool, Any]] = [
        (status == 412 or code == "PreconditionFailed", lambda: ConditionFailed(str(answer))),
        (status == 416 or code == "InvalidRange", lambda: OutOfRange(str(answer))),
        (code == "NoSuchBucket", lambda: _no_bucket(what, bucket)),
        (code in _NO_SPACE or status == 507, lambda: _no_space(answer, what, url, key)),
        (code in EXPIRED, lambda: _expired(answer, what, key)),
        (code == "NotImplemented" or status == 501, lambda: _unable(answer, what, key)),
        (code in _TRANSIENT or status == 429 or status >= 500, lambda: Unavailable(f"{what}: {answer}", key=key)),
        (code == "NoSuchUpload", lambda: UploadGone(f"{what}: {answer}")),
        (status == 409, lambda: Conflict(str(answer))),
        (status == 404, lambda: NotFound(f"no object {key} in {url}", key=key)),
        (code in _WRONG_REGION or status in (301, 307), lambda: _wrong_region(answer, what, key)),
        (code == "RequestTimeTooSkewed", lambda: _wrong_clock(answer, what, key)),
        (status in (401, 403), lambda: _denied(answer, what, key)),
    ]
    for matches, make in kinds:
        if matches:
            error: Exception = make()
            return error
    return _unable(answer, what, key)


def _no_bucket(what: str, bucket: str) -> Invalid:
    return Invalid(f"{what}: there is no bucket {bucket!r}", hint=f"aws s3api create-bucket --bucket {bucket}")


def _no_space(answer: Answer, what: str, url: str, key: str | None) -> NoSpace:
    hint = f"free space in {url}, or raise the quota; nothing was committed"
    return NoSpace(f"{what}: the store is full or over its quota: {answer}", hint=hint, key=key)


def _expired(answer: Answer, what: str, key: str | None) -> RetomaError:
    message = f"{what}: {answer} (also with what the provider chain gives now)"
    if answer.code == "InvalidAccessKeyId":
        return Invalid(message, hint="this access key does not exist; check the credentials", key=key)
    return Unavailable(message, hint="renew the credentials", key=key)


def _wrong_region(answer: Answer, what: str, key: str | None) -> Invalid:
    return Invalid(f"{what}: {answer}", hint="set RETOMA_S3_REGION to the bucket's region", key=key)


def _wrong_clock(answer: Answer, what: str, key: str | None) -> Invalid:
    return Invalid(f"{what}: {answer}", hint="set this machine's clock: signatures carry the time", key=key)


def _unable(answer: Answer, what: str, key: str | None) -> Invalid:
    hint = "the server cannot do what a store needs, conditional writes for one; see docs/s3.md"
    return Invalid(f"{what}: {answer}", hint=hint, key=key)


def _denied(answer: Answer, what: str, key: str | None) -> Invalid:
    return Invalid(f"{what}: {answer}", hint="the rights that are needed are in docs/s3.md", key=key)


def _told(error: Exception) -> str:
    """Some exceptions of aiohttp and asyncio say nothing."""
    return str(error) or type(error).__name__
