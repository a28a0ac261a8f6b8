"""A small Vault: the encrypt and decrypt endpoints of its Transit engine over HTTP, with Vault's words and statuses.

Written after builtin/logical/transit and sdk/helper/keysutil of hashicorp/vault. What it knows: tokens, versions of
keys, min_decryption_version, derivation from a context, associated data, and being sealed, throttled or silent.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import re
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

__all__ = ["Refused", "TransitKey", "Vault", "vault"]


class Refused(Exception):
    """Vault's answer when it is not 200."""

    def __init__(self, status: int, *errors: str) -> None:
        super().__init__(status, errors)
        self.status = status
        self.errors = errors


@dataclass(slots=True)
class TransitKey:
    """A key of the engine."""

    derived: bool = False
    versions: dict[int, bytes] = field(default_factory=lambda: {1: secrets.token_bytes(32)})
    min_decryption_version: int = 1

    def rotate(self) -> None:
        self.versions[max(self.versions) + 1] = secrets.token_bytes(32)

    def cipher(self, version: int, context: bytes) -> AESGCM:
        secret = self.versions[version]
        if not self.derived:
            return AESGCM(secret)  # Vault ignores a context that it has no use for
        if not context:
            raise Refused(400, "missing 'context' for key derivation; the key was created using a derived key")
        return AESGCM(hmac.digest(secret, context, "sha256"))


@dataclass(slots=True)
class Vault:
    """The server's state, for tests to arrange."""

    url: str = ""
    token: str = "hvs.root"
    keys: dict[str, TransitKey] = field(default_factory=dict)
    mount: str = "transit"
    trouble: Refused | None = None
    """Answer this instead."""
    authentication_failure_status: int = 400
    """Some versions answer 500."""
    silent: threading.Event | None = None
    """Say nothing until it is set."""
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def answer(self, path: str, token: str | None, body: dict[str, Any]) -> dict[str, Any]:
        self.asked.append((path, body))
        if self.silent is not None:
            self.silent.wait(10)
        if self.trouble is not None:
            raise self.trouble
        if token != self.token:
            raise Refused(403, "2 errors occurred:\n\t* permission denied\n\t* invalid token\n\n")
        found = re.fullmatch(rf"/v1/{re.escape(self.mount)}/(encrypt|decrypt)/([\w.-]+)", path)
        if found is None:
            raise Refused(404, f'no handler for route "{path.removeprefix("/v1/")}". route entry not found.')
        if (key := self.keys.get(found[2])) is None:
            raise Refused(400, "encryption key not found")
        given = {name: _decoded(body, name) for name in ("context", "associated_data")}
        return self._encrypt(key, body, given) if found[1] == "encrypt" else self._decrypt(key, body, given)

    def _encrypt(self, key: TransitKey, body: dict[str, Any], given: dict[str, bytes]) -> dict[str, Any]:
        version, nonce = max(key.versions), secrets.token_bytes(12)
        sealed = key.cipher(version, given["context"]).encrypt(
            nonce, _decoded(body, "plaintext"), given["associated_data"]
        )
        return {"ciphertext": f"vault:v{version}:{base64.b64encode(nonce + sealed).decode()}", "key_version": version}

    def _decrypt(self, key: TransitKey, body: dict[str, Any], given: dict[str, bytes]) -> dict[str, Any]:
        ciphertext = body.get("ciphertext") or ""
        if not ciphertext.startswith("vault:v"):
            raise Refused(400, "invalid ciphertext: no prefix")
        number, colon, encoded = ciphertext.removeprefix("vault:v").partition(":")
        if not colon:
            raise Refused(400, "invalid ciphertext: wrong number of fields")
        if not number.isdigit():
            raise Refused(400, "invalid ciphertext: version number could not be decoded")
        version = int(number)
        if version > max(key.versions):
            raise Refused(400, "invalid ciphertext: version is too new")
        if version < key.min_decryption_version:
            raise Refused(400, "ciphertext or signature version is disallowed by policy (too old)")
        try:
            blob = base64.b64decode(encoded, validate=True)
        except binascii.Error:
            raise Refused(400, "invalid ciphertext: could not decode base64") from None
        if len(blob) < 12:
            raise Refused(400, "invalid ciphertext length")
        try:
            plaintext = key.cipher(version, given["context"]).decrypt(blob[:12], blob[12:], given["associated_data"])
        except InvalidTag:
            raise Refused(self.authentication_failure_status, "cipher: message authentication failed") from None
        return {"plaintext": base64.b64encode(plaintext).decode()}


def _decoded(body: dict[str, Any], name: str) -> bytes:
    try:
        return base64.b64decode(body.get(name) or "", validate=True)
    except binascii.Error:
        raise Refused(400, f"failed to base64-decode {name}") from None


@contextmanager
def vault() -> Iterator[Vault]:
    """A running one, on a free port of this machine."""
    state = Vault()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
            status, content = 200, dict[str, Any]()
            try:
                content = {"data": state.answer(self.path, self.headers.get("X-Vault-Token"), body)}
            except Refused as refused:
                status, content = refused.status, {"errors": list(refused.errors)}
            raw = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield state
    finally:
        if state.silent is not None:
            state.silent.set()
        server.shutdown()
        thread.join()
        server.server_close()
