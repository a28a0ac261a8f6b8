"""Master keys in AWS KMS: moto's KMS for what it does, botocore's stubber for what it refuses."""

from __future__ import annotations

import builtins
import socket
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.stub import Stubber
from moto import mock_aws

from sagas.errors import CannotOpen, InvalidInput, KeyDenied, KeyLost, KeyUnavailable, Tampered
from sagas.wrapping import AwsKmsWrapper, KeyName, Wrapped
from tests.sealing.wrapping import KEY, NAME, OTHER_NAMES

ARN = "arn:aws:kms:eu-central-1:111122223333:key/1234abcd-12ab-34cd-56ef-1234567890ab"


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made-up ones, and no others."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")


@pytest.fixture
def kms() -> Iterator[Any]:
    with mock_aws():
        yield boto3.client("kms", region_name="eu-central-1")


def new_key(kms: Any) -> str:
    return str(kms.create_key()["KeyMetadata"]["Arn"])


# --- what it does -----------------------------------------------------------------------------------------------------


async def test_a_wrapped_key_unwraps_under_its_name(kms: Any) -> None:
    arn = new_key(kms)
    wrapper = AwsKmsWrapper.connect(arn)
    wrapped = await wrapper.wrap(NAME, KEY)
    assert wrapped.master == arn
    assert KEY not in wrapped.wrapped
    assert await AwsKmsWrapper(kms, arn).unwrap(NAME, wrapped) == KEY


@pytest.mark.parametrize("other", OTHER_NAMES, ids=str)
async def test_under_another_name_it_does_not_unwrap(kms: Any, other: KeyName) -> None:
    wrapper = AwsKmsWrapper(kms, new_key(kms))
    wrapped = await wrapper.wrap(NAME, KEY)
    with pytest.raises(Tampered, match="InvalidCiphertextException"):
        await wrapper.unwrap(other, wrapped)


async def test_older_master_keys_unwrap_and_only_those_that_are_trusted(kms: Any) -> None:
    before, now = new_key(kms), new_key(kms)
    old = await AwsKmsWrapper(kms, before).wrap(NAME, KEY)
    assert await AwsKmsWrapper(kms, now, older=[before]).unwrap(NAME, old) == KEY
    assert (await AwsKmsWrapper(kms, now, older=[before]).wrap(NAME, KEY)).master == now
    # KMS would unwrap it gladly: whoever writes to the database could name a key of his own here.
    with pytest.raises(KeyLost, match="is not among those given here"):
        await AwsKmsWrapper(kms, now).unwrap(NAME, old)


async def test_altered_bytes_are_told_from_a_lost_key(kms: Any) -> None:
    wrapper = AwsKmsWrapper(kms, new_key(kms))
    wrapped = await wrapper.wrap(NAME, KEY)
    with pytest.raises(Tampered):
        await wrapper.unwrap(NAME, Wrapped(wrapped.master, wrapped.wrapped[:-1]))


async def test_a_master_key_that_is_not_there_is_lost(kms: Any) -> None:
    with pytest.raises(KeyLost, match="does not exist \\(KMS: NotFoundException\\)"):
        await AwsKmsWrapper(kms, ARN).wrap(NAME, KEY)


# --- what it refuses --------------------------------------------------------------------------------------------------

# https://docs.aws.amazon.com/kms/latest/APIReference/API_Decrypt.html and API_Encrypt.html, section Errors, and the
# errors common to all of AWS.
ANSWERS: list[tuple[str, int, type[CannotOpen]]] = [
    ("ThrottlingException", 400, KeyUnavailable),
    ("LimitExceededException", 400, KeyUnavailable),
    ("KMSInternalException", 500, KeyUnavailable),
    ("DependencyTimeoutException", 500, KeyUnavailable),
    ("KeyUnavailableException", 500, KeyUnavailable),
    ("RequestTimeout", 408, KeyUnavailable),
    ("SomethingNew", 503, KeyUnavailable),
    ("SomethingNew", 429, KeyUnavailable),
    ("AccessDeniedException", 400, KeyDenied),
    ("UnrecognizedClientException", 403, KeyDenied),
    ("ExpiredTokenException", 403, KeyDenied),
    ("InvalidGrantTokenException", 400, KeyDenied),
    ("SomethingNew", 400, KeyDenied),
    ("NotFoundException", 400, KeyLost),
    ("DisabledException", 409, KeyLost),
    ("KMSInvalidStateException", 409, KeyLost),
    ("InvalidKeyUsageException", 400, KeyLost),
    ("InvalidCiphertextException", 400, Tampered),
    ("IncorrectKeyException", 400, Tampered),
]


@pytest.mark.parametrize(("code", "status", "error"), ANSWERS)
@pytest.mark.parametrize("operation", ["encrypt", "decrypt"])
async def test_what_kms_answers(operation: str, code: str, status: int, error: type[CannotOpen]) -> None:
    client = boto3.client("kms", region_name="eu-central-1", config=Config(retries={"total_max_attempts": 1}))
    wrapper = AwsKmsWrapper(client, ARN)
    with Stubber(client) as stubber:
        stubber.add_client_error(operation, code, f"cannot use {KEY!r}", http_status_code=status)
        with pytest.raises(CannotOpen) as refused:
            await (wrapper.wrap(NAME, KEY) if operation == "encrypt" else wrapper.unwrap(NAME, Wrapped(ARN, b"x")))
    assert type(refused.value) is error
    assert (refused.value.tenant, refused.value.key_id) == ("vinet", NAME.key_id)
    assert "canary" not in str(refused.value)
    assert refused.value.__suppress_context__


async def test_a_kms_that_is_away_is_unavailable() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"  # bound, and nobody listens
        with pytest.raises(KeyUnavailable, match="cannot be reached \\(EndpointConnectionError\\)"):
            await AwsKmsWrapper.connect(ARN, endpoint_url=url).wrap(NAME, KEY)


async def test_a_kms_that_says_nothing_is_unavailable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        once = Config(read_timeout=0.1, retries={"total_max_attempts": 1})
        with pytest.raises(KeyUnavailable, match="cannot be reached \\(ReadTimeoutError\\)"):
            await AwsKmsWrapper.connect(ARN, endpoint_url=url, config=once).wrap(NAME, KEY)


async def test_without_credentials_it_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    with pytest.raises(KeyDenied, match="there are no AWS credentials"):
        await AwsKmsWrapper.connect(ARN).wrap(NAME, KEY)


# --- how it is made ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["alias/sagas", "arn:aws:kms:eu-central-1:1:alias/sagas", "1234abcd", ""])
def test_what_is_not_the_arn_of_a_key_is_refused(key: str) -> None:
    with pytest.raises(InvalidInput, match="must be the ARN of a KMS key"):
        AwsKmsWrapper(None, key)
    with pytest.raises(InvalidInput, match="must be the ARN of a KMS key"):
        AwsKmsWrapper(None, ARN, older=[key])


def test_the_region_is_the_keys() -> None:
    assert AwsKmsWrapper.connect(ARN)._client.meta.region_name == "eu-central-1"
    assert repr(AwsKmsWrapper.connect(ARN)) == f"AwsKmsWrapper({ARN!r})"


def test_without_boto3_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any) -> Any:
        if name.startswith("boto3"):
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(InvalidInput, match=r"pip install '.\[aws\]'"):
        AwsKmsWrapper.connect(ARN)
