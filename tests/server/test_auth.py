"""Keys, tenants, operators, TLS, other origins, and what the log says about all of it."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import logging
import os
import socket
import ssl
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from bough.base.cli import add_arguments, from_arguments
from bough.base.config import Config, ServeConfig
from bough.base.errors import ConfigError
from bough.base.limits import Limits
from bough.server.app import create_app
from bough.server.auth import Keyring, is_loopback, read_keys
from bough.server.process import load, make_server, operate
from bough.server.service import Service

from .scripted import PATIENCE, ScriptedClient, make_config, make_engine, running_server, wait_for

KEYS = """
[keys.alice]
key = "sk-alice"
[keys.bob]
sha256 = "{}"
tenant = "team"
[keys.carol]
key = "sk-carol"
tenant = "team"
[keys.root]
key = "sk-root"
scopes = ["user", "admin"]
"""
BODY = {"prompt": "a prompt that is as secret as a canary", "max_tokens": 2}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(KEYS.format(hashlib.sha256(b"sk-bob").hexdigest()))
    return path


@pytest.fixture(scope="module")
def guarded(key_file: Path) -> Iterator[httpx.Client]:
    with running_server(api_key_file=str(key_file)) as server, httpx.Client(base_url=server.url) as http:
        yield http


def all_routes() -> list[tuple[str, str, str]]:
    edge = create_app(Service(make_config()))
    routes = edge.app.router.routes  # type: ignore[attr-defined]
    return sorted((r.scope, next(iter(r.methods)), r.path_format) for r in routes)


@pytest.mark.parametrize(("scope", "method", "path"), all_routes())
def test_every_route_but_the_public_ones_asks_for_a_key(
    guarded: httpx.Client, scope: str, method: str, path: str
) -> None:
    path = path.replace("{", "").replace("}", "")
    if scope == "public":
        assert guarded.request(method, path).status_code == 200
        return
    attempts = [
        ({}, path, method), (bearer("sk-alicf"), path, method), (bearer("-"), path, method),
        ({"authorization": "sk-alice"}, path, method), ({"x-api-key": "no"}, path, method),
        ({}, f"{path}?api_key=sk-alice&key=sk-alice", method), ({"host": "localhost/health?"}, path, method),
        ({}, path, "HEAD"), ({}, path, "OPTIONS"), ({"x-forwarded-for": "127.0.0.1"}, path, method),
        ({"connection": "upgrade", "upgrade": "websocket"}, path, "GET"),
    ]  # fmt: skip
    for headers, target, verb in attempts:
        answer = guarded.request(verb, target, headers=headers)
        assert answer.status_code == 401, (headers, target, verb)
        assert answer.headers["www-authenticate"] == "Bearer"
        if verb != "HEAD":
            error = answer.json()["error"]
            assert path.startswith(("/api/", "/v1/messages")) or error["code"] == "invalid_api_key"
    if scope == "admin":
        forbidden = guarded.request(method, path, headers=bearer("sk-alice"))
        assert forbidden.status_code == 403 and forbidden.json()["error"]["type"] == "permission_error"
        # Those that need a body find none.
        status = 400 if "lora_adapter" in path else 200
        assert guarded.request(method, path, headers=bearer("sk-root")).status_code == status


@pytest.mark.parametrize(
    "path", ["//v1/models", "/v1/models/", "/V1/models", "/v1%2fmodels", "/./v1/models", "/v1/models."]
)
def test_other_spellings_of_a_path_open_nothing(guarded: httpx.Client, path: str) -> None:
    assert guarded.get(path).status_code in (401, 404)


def test_keys_of_all_kinds(guarded: httpx.Client) -> None:
    for headers in (
        bearer("sk-alice"),
        bearer("sk-bob"),
        {"x-api-key": "sk-carol"},
        {"authorization": "bearer sk-root"},
    ):
        assert guarded.post("/v1/completions", json=BODY, headers=headers).status_code == 200


def test_tenants_share_nothing(key_file: Path) -> None:
    with running_server(0.01, api_key_file=str(key_file)) as server, httpx.Client(base_url=server.url) as http:
        for key, tenant in (("sk-alice", "alice"), ("sk-bob", "team"), ("sk-carol", "team")):
            for path, body in (
                ("/v1/completions", BODY),
                ("/generate", {"text": "a"}),
                ("/v1/responses", {"input": "a"}),
            ):
                assert http.post(path, json={**body, "cache_salt": "s"}, headers=bearer(key)).status_code == 200
                assert (server.client.seen[-1].namespace.tenant, server.client.seen[-1].namespace.salt) == (tenant, "s")
        # Files and responses are the tenant's.
        file = http.post(
            "/v1/files", data={"purpose": "user_data"}, files={"file": b"x"}, headers=bearer("sk-bob")
        ).json()["id"]
        reply = http.post("/v1/responses", json={"input": "a"}, headers=bearer("sk-bob")).json()["id"]
        for path in (f"/v1/files/{file}", f"/v1/files/{file}/content", f"/v1/responses/{reply}"):
            assert http.get(path, headers=bearer("sk-carol")).status_code == 200
            for other in ("sk-alice", "sk-root"):
                assert http.get(path, headers=bearer(other)).status_code == 404
        continued = {"input": "a", "previous_response_id": reply}
        assert http.post("/v1/responses", json=continued, headers=bearer("sk-alice")).status_code == 400

        # Ids of requests too: the same one twice, and each tenant aborts its own.
        async def both() -> None:
            async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as client:
                body = {
                    "text": "endless",
                    "rid": "same",
                    "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True},
                }
                running = [
                    asyncio.create_task(client.post("/generate", json=body, headers=bearer(key)))
                    for key in ("sk-alice", "sk-bob")
                ]
                while len(server.client.running) < 2:
                    await asyncio.sleep(0.005)
                again = await client.post("/generate", json=body, headers=bearer("sk-carol"))
                assert again.json()["error"]["code"] == "duplicate_rid"
                for key, count in (("sk-root", 0), ("sk-alice", 1), ("sk-alice", 0), ("sk-carol", 1)):
                    answer = await client.post("/abort_request", json={"rid": "same"}, headers=bearer(key))
                    assert answer.json() == {"aborted": count}, key
                    if key == "sk-alice":
                        await running[0]
                answers = [await task for task in running]
                assert [a.json()["meta_info"]["finish_reason"]["type"] for a in answers] == ["abort"] * 2
                assert answers[0].json()["meta_info"]["id"] == "same"
                refused = await client.post("/abort_request", json={"abort_all": True}, headers=bearer("sk-bob"))
                assert refused.status_code == 403

        asyncio.run(both())


def test_keys_of_the_command_line() -> None:
    with running_server(api_key=("one",)) as server, httpx.Client(base_url=server.url) as http:
        assert http.post("/v1/completions", json=BODY).status_code == 401
        assert http.post("/v1/completions", json=BODY, headers=bearer("one")).status_code == 200
        assert server.client.seen[-1].namespace.tenant == ""
        assert http.post("/flush_cache", headers=bearer("one")).status_code == 403
    with running_server(api_key=("one", "two"), admin_api_key="root") as server:
        with httpx.Client(base_url=server.url) as http:
            tenants = []
            for key in ("one", "two"):
                assert http.post("/v1/completions", json=BODY, headers=bearer(key)).status_code == 200
                tenants.append(server.client.seen[-1].namespace.tenant)
            assert len(set(tenants)) == 2 and "" not in tenants
            assert http.post("/flush_cache", headers=bearer("root")).status_code == 200
            shown = http.get("/server_info", headers=bearer("root"))
            assert shown.status_code == 200 and "api_key" not in shown.json()["config"]["serve"]
            assert "root" not in shown.text.replace('"root"', "")
    # A key for operators alone leaves generating open.
    with running_server(admin_api_key="root") as server, httpx.Client(base_url=server.url) as http:
        assert http.post("/v1/completions", json=BODY, headers=bearer("none")).status_code == 200
        assert http.post("/flush_cache").status_code == 401
        assert http.post("/flush_cache", headers=bearer("none")).status_code == 401


def test_flags_that_may_be_repeated() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given = parser.parse_args(["--api-key", "a", "--api-key", "b", "--cors-origin", "*", "--files", "/tmp/f"])
    config = from_arguments(given, Config())
    assert (config.serve.api_key, config.serve.cors_origin, config.serve.files) == (("a", "b"), ("*",), "/tmp/f")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=Config) == config
    assert from_arguments(parser.parse_args([]), Config()) == Config()


def test_a_server_that_others_can_reach_is_not_operated_without_a_key() -> None:
    ring = Keyring(ServeConfig(host="0.0.0.0"))
    connection = {"headers": [], "server": ("127.0.0.1", 30000)}
    assert ring.admit(connection, "user").scopes == {"user"}
    with pytest.raises(Exception, match="send an API key"):
        ring.admit(connection, "admin")
    assert ring.admit({"headers": [], "server": ("/run/socket", None)}, "admin").scopes == {"user", "admin"}
    assert [is_loopback(h) for h in ("127.0.0.1", "::1", "localhost", "127.9.9.9", "0.0.0.0", "::", "example.org")] == [
        True, True, True, True, False, False, False,
    ]  # fmt: skip


def test_the_key_file_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys.toml"
    path.write_text('[keys.a]\nkey = "first"\n')
    monkeypatch.setattr("bough.server.auth.RELOAD_SECONDS", 0.0)
    ring = Keyring(ServeConfig(api_key_file=str(path)))

    def known(key: bytes) -> bool:
        try:
            return ring.admit({"headers": [(b"x-api-key", key)]}, "user").name == "a"
        except Exception:
            return False

    assert known(b"first") and not known(b"second")
    path.write_text('[keys.a]\nkey = "second, longer"\n')
    os.utime(path, ns=(1, 1))
    assert known(b"second, longer") and not known(b"first")
    path.write_text("broken")
    os.utime(path, ns=(2, 2))
    assert known(b"second, longer")


@pytest.mark.parametrize("text", [
    "", "no = 1", "[keys.a", "[keys.a]", '[keys.a]\nkey = ""', '[keys.a]\nkey = "x"\nsha256 = "00"',
    '[keys.a]\nsha256 = "00"', '[keys.a]\nkey = "secret-x"\ntenant = "../b"', '[keys.a]\nkey = "secret-x"\ntenant = ""',
    '[keys.a]\nkey = "secret-x"\nscopes = ["king"]', '[keys.a]\nkey = "secret-x"\nscopes = []',
    '[keys.a]\nkey = "secret-x"\n[tenants.b]\nrequests = 1', '[keys.a]\nkey = "secret-x"\n[tenants.a]\nrequests = 0',
    '[keys.a]\nkey = "secret-x"\n[tenants.a]\ntokens = true', '[keys.a]\nkey = "secret-x"\n[tenants.a]\nother = 1',
    '[keys.a]\nkey = "secret-x"\n[tenants.a]\nqueue_share = 0.0', '[keys.a]\nkey = "secret-x"\n[tenants]\na = 1',
    '[keys.a]\nkey = "secret-x"\nother = 1', '[keys.a]\nkey = "secret-x"\n[keys.b]\nkey = "secret-x"',
])  # fmt: skip
def test_broken_key_files(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="key file") as error:
        read_keys(path)
    assert "secret-x" not in error.value.message


def test_other_origins(guarded: httpx.Client, key_file: Path) -> None:
    page = {"origin": "https://chat.example"}
    assert "access-control-allow-origin" not in guarded.get("/v1/models", headers={**page, **bearer("sk-bob")}).headers
    with running_server(cors_origin=("https://chat.example",), api_key_file=str(key_file)) as server:
        with httpx.Client(base_url=server.url) as http:
            ask = {**page, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
            allowed = http.options("/v1/chat/completions", headers=ask)
            assert allowed.status_code == 200
            assert allowed.headers["access-control-allow-origin"] == page["origin"]
            answer = http.get("/v1/models", headers={**page, **bearer("sk-bob")})
            assert answer.headers["access-control-allow-origin"] == page["origin"]
            assert "x-request-id" in answer.headers["access-control-expose-headers"]
            refused = http.options("/v1/models", headers={**ask, "origin": "https://evil.example"})
            assert refused.status_code == 400 and "origin" in refused.json()["error"]["message"]
            assert "access-control-allow-origin" not in refused.headers


def test_what_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "bough")
    body = {**BODY, "user": "canary-user"}
    for level, lines in (("off", 0), ("summary", 1), ("full", 2)):
        caplog.clear()
        with running_server(api_key=("canary-key",), log_requests=level) as server:
            headers = {**bearer("canary-key"), "x-request-id": "mine"}
            httpx.post(f"{server.url}/v1/completions?key=canary", json=body, headers=headers)
            httpx.get(f"{server.url}/health")
            logged = [r.getMessage() for r in caplog.records if r.getMessage().startswith("request mine")]
        assert len(logged) == lines, logged
        text = "\n".join(r.getMessage() for r in caplog.records)
        assert "canary-key" not in text and ("canary" in text) == (level == "full")
    assert ": POST /v1/completions for key-" in logged[-1] and ": 200 in " in logged[-1]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost "
        "-addext subjectAltName=IP:127.0.0.1 -keyout key.pem -out cert.pem"
    )
    subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    return folder / "cert.pem", folder / "key.pem"


def test_tls(certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    with running_server(tls_cert=str(cert), tls_key=str(key)) as server:
        url = f"https://127.0.0.1:{server.port}"
        context = ssl.create_default_context(cafile=str(cert))
        with httpx.Client(base_url=url, verify=context) as http:
            assert http.post("/v1/completions", json=BODY).status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{server.port}/health")
    with pytest.raises(ConfigError, match="certificate"):
        load(make_server(create_app(Service(make_config())), make_config(tls_cert=str(key), tls_key=str(cert))))


def test_the_operators_socket(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    path_text = str(path)
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(path_text)
    config = make_config(admin_socket=path_text, api_key=("one",), files=str(tmp_path / "files"))

    async def main() -> None:
        client = ScriptedClient(Limits())
        await client.start()
        service = Service(config)
        service.attach(make_engine(client))
        server = make_server(create_app(service), config, tls=False)
        running = asyncio.create_task(operate(server, path_text))
        while not server.started:
            await asyncio.sleep(0.001)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        transport = httpx.AsyncHTTPTransport(uds=path_text)
        async with httpx.AsyncClient(transport=transport, base_url="http://operator") as http:
            assert (await http.post("/flush_cache")).status_code == 200
            assert (await http.get("/server_info")).status_code == 200
        server.should_exit = True
        await running
        assert not path.exists()
        assert service.engine is not None
        await service.engine.close()

    asyncio.run(main())


def test_flush_says_when_something_stays() -> None:
    with running_server(0.01) as server, httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
        endless = {"max_new_tokens": 3000, "ignore_eos": True}
        body = json.dumps({"text": "hello", "rid": "endless", "sampling_params": endless, "stream": True})
        with http.stream("POST", "/generate", content=body) as stream:
            lines = stream.iter_lines()  # which ends the request when it is collected
            next(lines)
            wait_for(lambda: bool(server.client.running))
            busy = httpx.post(f"{server.url}/flush_cache")
            assert busy.status_code == 400 and busy.json()["error"]["code"] == "cache_in_use"
            assert httpx.post(f"{server.url}/flush_cache?timeout=0.1").status_code == 400
            httpx.post(f"{server.url}/abort_request", json={"rid": "endless"})
            assert httpx.post(f"{server.url}/flush_cache?timeout=20", timeout=30).status_code == 200
        for wrong in ("x", "-1", "nan", "1e9"):
            assert http.post(f"/flush_cache?timeout={wrong}").status_code == 400
