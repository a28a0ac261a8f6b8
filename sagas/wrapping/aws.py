"""Data keys wrapped by a key of AWS KMS, through boto3.

boto3 rather than one of its asyncio copies: it is AWS's own, and a key is asked for once in minutes, so a thread per
call costs nothing. The key's name goes along as encryption context: KMS authenticates it, and CloudTrail shows it.

The process needs `kms:Encrypt` and `kms:Decrypt` on the key. `kms:Decrypt` alone does for one that only reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final, Never, Self

from sagas.errors import CannotOpen, InvalidInput, KeyDenied, KeyLost, KeyUnavailable, Tampered
from sagas.wrapping.wrapper import KeyName, Wrapped, checked_names

__all__ = ["AwsKmsWrapper"]

_TRANSIENT: Final = frozenset(
    {
        "DependencyTimeoutException",
        "KMSInternalException",
        "KeyUnavailableException",  # KMS's own words for "send it again"
        "LimitExceededException",
        "RequestTimeout",
        "RequestTimeoutException",
        "ServiceUnavailable",
        "ServiceUnavailableException",
        "Throttling",
        "ThrottlingException",
        "TooManyRequestsException",
    }
)
_LOST: Final = {
    "DisabledException": "its master key is disabled",
    "InvalidKeyUsageException": "its master key is not for encryption",
    "KMSInvalidStateException": "its master key is pending deletion, or otherwise out of use",
    "NotFoundException": "its master key does not exist",
}
_ALTERED: Final = frozenset({"IncorrectKeyException", "InvalidCiphertextException"})


class AwsKmsWrapper:
    """Wraps with one symmetric key of AWS KMS; unwraps also what the keys before it have wrapped."""

    def __init__(self, client: Any, key: str, *, older: Sequence[str] = ()) -> None:
        """`client` is boto3's for KMS; `key` and `older` are ARNs of keys, not aliases.

        An alias can be pointed elsewhere by whoever may update it, and what the database names has to be compared with
        what is trusted here.
        """
        names = checked_names(key, older)
        for arn in names:
            if not (arn.startswith("arn:") and ":key/" in arn):
                raise InvalidInput("key", f"must be the ARN of a KMS key (arn:...:key/...), not {arn!r}")
        self._client = client
        self._key: Final = key
        self._trusted: Final = frozenset(names)

    @classmethod
    def connect(cls, key: str, *, older: Sequence[str] = (), **client: Any) -> Self:
        """With a client made here: the region is the key's, credentials are boto3's ordinary ones.

        It gives up after seconds, not minutes; `client` goes to boto3's `client` (endpoint_url, credentials ...).
        Raises InvalidInput when boto3 is not installed.
        """
        try:
            from boto3.session import Session  # noqa: PLC0415 - an extra: only who uses it needs it
            from botocore.config import Config  # noqa: PLC0415
        except ImportError:
            raise InvalidInput("AwsKmsWrapper", "needs boto3: pip install '.[aws]' in the checkout") from None
        checked_names(key, older)
        settings = {
            "region_name": key.split(":")[3] if key.count(":") > 3 else None,
            "config": Config(connect_timeout=2, read_timeout=3, retries={"total_max_attempts": 2}),
            **client,
        }
        return cls(Session().client("kms", **settings), key, older=older)

    def __repr__(self) -> str:
        return f"AwsKmsWrapper({self._key!r})"

    async def wrap(self, name: KeyName, key: bytes) -> Wrapped:
        """Wrap with the newest master key."""
        answer = await self._call(name, "encrypt", KeyId=self._key, Plaintext=key, EncryptionContext=name.as_context())
        return Wrapped(self._key, bytes(answer["CiphertextBlob"]))

    async def unwrap(self, name: KeyName, wrapped: Wrapped) -> bytes:
        """Unwrap with the master key that wrapped it, if it is one of ours."""
        if wrapped.master not in self._trusted:
            raise KeyLost(name.tenant, name.key_id, f"its master key {wrapped.master!r} is not among those given here")
        answer = await self._call(
            name,
            "decrypt",
            KeyId=wrapped.master,
            CiphertextBlob=wrapped.wrapped,
            EncryptionContext=name.as_context(),
        )
        return bytes(answer["Plaintext"])

    async def _call(self, name: KeyName, operation: str, **arguments: Any) -> dict[str, Any]:
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError  # noqa: PLC0415 - as above

        try:
            answer: dict[str, Any] = await asyncio.to_thread(getattr(self._client, operation), **arguments)
        except NoCredentialsError:
            raise KeyDenied(name.tenant, name.key_id, "KMS was not asked: there are no AWS credentials") from None
        except ClientError as error:
            self._refused(name, error.response)
        except BotoCoreError as error:  # no connection, no answer in time
            raise KeyUnavailable(name.tenant, name.key_id, f"KMS cannot be reached ({type(error).__name__})") from None
        return answer

    @staticmethod
    def _refused(name: KeyName, answer: Any) -> Never:
        """Raise what KMS's answer means. Its code is named, its text is not: it may quote what we sent."""
        code = str(answer.get("Error", {}).get("Code", ""))
        status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        error: CannotOpen
        if code in _LOST:
            error = KeyLost(name.tenant, name.key_id, f"{_LOST[code]} (KMS: {code})")
        elif code in _ALTERED:
            error = Tampered(
                name.tenant,
                name.key_id,
                f"its wrapped bytes do not authenticate under this name and master key (KMS: {code})",
            )
        elif code in _TRANSIENT or status >= 500 or status == 429:
            error = KeyUnavailable(name.tenant, name.key_id, f"KMS says: not now ({code or status})")
        else:
            # AccessDeniedException, expired or unknown credentials; and whatever else it refuses us for.
            error = KeyDenied(name.tenant, name.key_id, f"KMS refuses us ({code or status})")
        raise error from None
