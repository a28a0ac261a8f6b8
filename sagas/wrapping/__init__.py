"""Master keys: who wraps the data keys that the database keeps.

A wrapper is handed a key of 32 bytes and its name, and gives back bytes that only it can turn into the key again, and
only under that name. It is called once per key and process and cache age, not per run, so it may be a service far away.

    LocalKeyWrapper       master keys from a file or from the environment
    AwsKmsWrapper         a key of AWS KMS                (pip install '.[aws]')
    VaultTransitWrapper   a key of Vault's Transit engine (pip install '.[vault]')

Another one needs the two methods of `KeyWrapper` and nothing else.
"""

from __future__ import annotations

from sagas.wrapping.aws import AwsKmsWrapper
from sagas.wrapping.local import LocalKeyWrapper, add_master_key
from sagas.wrapping.vault import VaultTransitWrapper
from sagas.wrapping.wrapper import KeyName, KeyWrapper, Wrapped

__all__ = [
    "AwsKmsWrapper",
    "KeyName",
    "KeyWrapper",
    "LocalKeyWrapper",
    "VaultTransitWrapper",
    "Wrapped",
    "add_master_key",
]
