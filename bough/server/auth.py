"""Who may use which route: API keys with their tenants and scopes.

Routes declare a scope (:mod:`bough.server.routes`), and nothing is decided by looking at paths. Without any key,
whoever reaches the server may generate, and may also operate it where the server listens on this machine only.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import re
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from starlette.types import Scope as Connection

from bough.base.config import ServeConfig
from bough.base.errors import ConfigError
from bough.server.errors import Forbidden, Unauthorized
from bough.server.quotas import UNBOUNDED, Quota
from bough.server.routes import Scope

logger = logging.getLogger("bough.server")

RELOAD_SECONDS = 1.0
"""How often the key file is looked at."""
_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
_FIELDS = {"key", "sha256", "tenant", "scopes"}
_QUOTAS = {"requests", "tokens", "queue_share"}


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks. What two tenants cache, store and name is kept apart; the empty tenant is that of servers without."""

    name: str
    tenant: str
    scopes: frozenset[Scope]


OPERATOR = Principal("operator", "", frozenset(("user", "admin")))
ANYONE = Principal("anyone", "", frozenset(("user",)))


@dataclass(frozen=True, slots=True)
class Keys:
    """What a key file says: who has which key, by digest, and the quotas of tenants that have one."""

    principals: Mapping[bytes, Principal]
    quotas: Mapping[str, Quota]


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class Keyring:
    """All keys, from the command line and from the key file, which is read again when it changes.

    Raises ConfigError for a key file that cannot be read.
    """

    def __init__(self, config: ServeConfig) -> None:
        self._fixed = _from_flags(config)
        self._path = None if config.api_key_file is None else Path(config.api_key_file)
        self._read = Keys({}, {}) if self._path is None else read_keys(self._path)
        self._stamp = _stamp(self._path)
        self._looked_at = time.monotonic()
        self._open = not config.api_key and self._path is None
        self._operable = is_loopback(config.host) and config.admin_api_key is None and config.admin_socket is None

    def admit(self, connection: Connection, scope: Scope) -> Principal:
        """Who is asking on ``connection`` for a route of ``scope``. Raises Unauthorized or Forbidden."""
        if scope == "public":
            return ANYONE
        server = connection.get("server")
        if server is not None and server[1] is None:  # a Unix socket, which its mode protects
            return OPERATOR
        key = _presented(connection["headers"])
        principal = None if key is None else self._find(key)
        # Clients send any key to a server that asks for none.
        if principal is None and self._open and (scope == "user" or self._operable):
            principal = OPERATOR if self._operable else ANYONE
        if principal is None:
            raise Unauthorized(
                "send an API key, as the header Authorization: Bearer KEY"
                if key is None
                else "the API key is not known"
            )
        if scope not in principal.scopes:
            raise Forbidden(f"this route needs a key with the scope {scope}, or the server's own socket for operators")
        return principal

    def quota(self, tenant: str) -> Quota:
        """How much ``tenant`` may have in flight, by the latest key file."""
        return self._read.quotas.get(tenant, UNBOUNDED)

    def _find(self, key: bytes) -> Principal | None:
        self._reload()
        presented = hashlib.sha256(key).digest()
        found = None
        # Every key is compared, so that the time says nothing about any.
        for known, principal in (*self._fixed.items(), *self._read.principals.items()):
            if hmac.compare_digest(known, presented):
                found = principal
        return found

    def _reload(self) -> None:
        now = time.monotonic()
        if self._path is None or now - self._looked_at < RELOAD_SECONDS:
            return
        self._looked_at = now
        if (stamp := _stamp(self._path)) == self._stamp:
            return
        self._stamp = stamp
        try:
            self._read = read_keys(self._path)
            logger.info("read %d keys from %s", len(self._read.principals), self._path)
        except ConfigError as error:
            logger.error("the keys stay as they were: %s", error.message)


def is_loopback(host: str) -> bool:
    """Whether a server that listens on ``host`` can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_keys(path: Path) -> Keys:
    """A TOML file of tables ``[keys.NAME]`` with ``key`` or ``sha256`` (hexadecimal), and optionally ``tenant`` (by
    default the name) and ``scopes`` (by default ``["user"]``); and of tables ``[tenants.NAME]``, see :class:`Quota`.

    Raises ConfigError that names the file and the key, never its value.
    """
    try:
        whole = tomllib.loads(path.read_text("utf-8"))
        tables, tenants = whole.get("keys"), whole.get("tenants", {})
    except OSError as error:
        raise ConfigError(f"the key file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        raise ConfigError(f"the key file {path} is not valid TOML") from None
    if not isinstance(tables, dict) or not tables:
        raise ConfigError(f"the key file {path} has no table [keys.NAME]")
    found: dict[bytes, Principal] = {}
    for name, table in tables.items():
        known, principal = _entry(path, name, table)
        if known in found:
            raise ConfigError(f"the key file {path} has the key of {name!r} twice")
        found[known] = principal
    known_tenants = {principal.tenant for principal in found.values()}
    if not isinstance(tenants, dict) or (set(tenants) - known_tenants):
        raise ConfigError(f"the key file {path}: [tenants.NAME] names a tenant that a key has")
    return Keys(found, {name: _quota(path, name, table) for name, table in tenants.items()})


def _quota(path: Path, name: str, table: Any) -> Quota:
    where = f"the key file {path}: [tenants.{name}]"
    if not isinstance(table, Mapping) or set(table) - _QUOTAS:
        raise ConfigError(f"{where} takes requests, tokens and queue_share")
    for field in ("requests", "tokens"):
        if field in table and (type(table[field]) is not int or table[field] < 1):
            raise ConfigError(f"{where}: {field} is a whole number of at least 1")
    share = table.get("queue_share", 1.0)
    if type(share) not in (int, float) or not 0 < share <= 1:
        raise ConfigError(f"{where}: queue_share is more than 0 and at most 1")
    return Quota(**table)


def _entry(path: Path, name: str, table: Any) -> tuple[bytes, Principal]:
    where = f"the key file {path}: [keys.{name}]"
    if not isinstance(table, Mapping) or set(table) - _FIELDS or ("key" in table) == ("sha256" in table):
        raise ConfigError(f"{where} takes key or sha256, tenant and scopes")
    tenant, scopes, key = table.get("tenant", name), table.get("scopes", ["user"]), table.get("key")
    if not isinstance(tenant, str) or not _TENANT.fullmatch(tenant):
        raise ConfigError(f"{where}: a tenant has 1 to 64 letters, digits, dots, dashes and underscores")
    if not isinstance(scopes, list) or not scopes or set(scopes) - {"user", "admin"}:
        raise ConfigError(f"{where}: scopes are user and admin")
    if isinstance(key, str) and key:
        known = digest(key)
    else:
        try:
            known = bytes.fromhex(str(table.get("sha256", "")))
        except ValueError:
            known = b""
    if len(known) != 32:
        raise ConfigError(f"{where}: key is empty, or sha256 is not 64 hexadecimal digits")
    return known, Principal(name, tenant, frozenset(cast(list[Scope], scopes)))


def _from_flags(config: ServeConfig) -> dict[bytes, Principal]:
    """The keys of the command line. Several are several tenants; a single one needs nobody to be kept apart from."""
    if any(not key for key in (*config.api_key, config.admin_api_key or "-")):
        raise ConfigError("an API key is empty")
    alone = len(config.api_key) == 1 and config.api_key_file is None
    found = {}
    for key in config.api_key:
        known = digest(key)
        name = f"key-{known.hex()[:12]}"
        found[known] = Principal(name, "" if alone else name, frozenset[Scope](("user",)))
    if config.admin_api_key is not None:
        found[digest(config.admin_api_key)] = OPERATOR
    return found


def _stamp(path: Path | None) -> tuple[int, int] | None:
    try:
        status = path.stat() if path is not None else None
    except OSError:
        return None
    return None if status is None else (status.st_mtime_ns, status.st_ino)


def _presented(headers: list[tuple[bytes, bytes]]) -> bytes | None:
    """The key of a request: a bearer token, or the header that Anthropic's clients use."""
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip()
        if name == b"x-api-key":
            return value.strip()
    return None
