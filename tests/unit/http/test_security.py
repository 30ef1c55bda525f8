"""Who may ask: keys with roles, read again when they change; addresses, names and kinds of body that are refused."""

import asyncio
import json
import socket

import httpx
import pytest

from service.app import Parts, serve_http
from service.errors import ConfigError
from service.http.security import read_keys
from service.http.server import HttpServer
from service.settings import load
from tests.support.waiting import PATIENCE_S

BODY = {"prompt": "x", "max_tokens": 1}
ROUTES = {
    "look": ("GET", "/state", None),
    "ask": ("POST", "/v1/completions", BODY),
    "operate": ("POST", "/v1/models/switch", {"model": "qwen"}),
    "list": ("GET", "/v1/models", None),
}


async def may(s, key: str) -> set[str]:
    """What a key is good for."""
    found = set()
    for name, (method, path, body) in ROUTES.items():
        answer = await s.http.request(method, path, json=body, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code in {200, 401, 403}
        if answer.status_code == 200:
            found.add(name)
        else:
            assert (
                answer.json()["error"]["type"]
                == {401: "AuthenticationError", 403: "PermissionDeniedError"}[answer.status_code]
            )
    return found


async def test_a_key_is_good_for_its_roles_and_nothing_else(served, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("plain\nviewer look\nboth ask,look\nhand operate\nall look, ask, operate\n")
    async with served(api_keys_file=keys) as s:
        assert await may(s, "plain") == {"ask", "list"}
        assert await may(s, "viewer") == {"look", "list"}
        assert await may(s, "both") == {"look", "ask", "list"}
        assert await may(s, "hand") == {"look", "operate", "list"}
        assert await may(s, "all") == {"look", "ask", "operate", "list"}
        assert await may(s, "ask") == set()
        assert await may(s, "sesame") == set()


async def test_keys_are_read_again_when_their_file_changes(served, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("old\n")
    async with served(api_keys_file=keys) as s:
        assert await may(s, "old") == {"ask", "list"}
        other = tmp_path / "other"
        other.write_text("new look\n")
        other.replace(keys)
        async with asyncio.timeout(PATIENCE_S):
            while await may(s, "new") != {"look", "list"}:
                pass
        assert await may(s, "old") == set()
        keys.write_text("# nobody\n")  # a mistake locks nobody out, and lets nobody in
        async with asyncio.timeout(PATIENCE_S):
            while await may(s, "new") != {"look", "list"}:
                pass
        assert await may(s, "old") == set()


@pytest.mark.parametrize("content", ["# nothing\n", "", "key admin\n", "key ask look boss\n"])
def test_a_file_of_keys_that_is_none_is_an_error_at_once(tmp_path, content):
    (tmp_path / "keys").write_text(content)
    with pytest.raises(ConfigError, match="api_keys_file"):
        HttpServer(load(http_port=0, api_keys_file=tmp_path / "keys"))


def test_what_is_wrong_with_the_file_is_said_without_its_words(tmp_path):
    (tmp_path / "keys").write_text("5ecret-one, 5ecret-two\n")
    with pytest.raises(ConfigError, match=r"line 1: a word is no role; roles are look, ask, operate") as caught:
        read_keys(tmp_path / "keys")
    assert "5ecret" not in str(caught.value)


async def test_without_keys_others_get_probes_and_metrics_and_nothing_else():
    server = HttpServer(load(http_port=0, http_host="0.0.0.0", dev_mode=True))
    port = server.address.rsplit(":", 1)[1]
    async with server.opened(), httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        for path in ("/health", "/metrics", "/version"):
            assert (await http.get(path)).status_code == 200
        assert (await http.get("/ready")).status_code == 503
        for method, path, body in ROUTES.values():
            answer = await http.request(method, path, json=body)
            assert answer.status_code == 403
            assert "api_keys_file" in answer.json()["error"]["message"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
async def test_a_server_alone_does_not_start_where_nobody_could_ask_it(host):
    settings = load(http_port=0, http_host=host)
    with pytest.raises(ConfigError, match="api_keys_file"):
        await serve_http(settings, Parts(lambda: None, None), asyncio.Event())


async def test_who_says_so_may_be_asked_by_anyone(served):
    async with served(http_host="0.0.0.0", http_anonymous=True, wait=False) as s:
        port = s.server.address.rsplit(":", 1)[1]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            async with asyncio.timeout(PATIENCE_S):
                while (await http.get("/ready")).status_code != 200:
                    pass
            assert (await http.post("/v1/completions", json=BODY)).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.1.evil.example", ""]
)
async def test_a_name_that_is_not_ours_is_refused(served, host):
    async with served(dev_mode=True) as s:
        for method, path, body in ROUTES.values():
            answer = await s.http.request(method, path, json=body, headers={"host": host})
            assert answer.status_code in {400, 421}
        assert s.engine.active == "llama"


@pytest.mark.parametrize(
    "host", ["localhost:1", "LOCALHOST", "[::1]:8", "10.1.2.3:80", "mine.example", socket.gethostname()]
)
async def test_our_own_names_and_numbers_are_good(served, host):
    async with served(http_hosts="mine.example") as s:
        assert (await s.http.get("/v1/models", headers={"host": host})).status_code == 200


async def test_where_there_are_keys_any_name_is_good_unless_names_are_set(served, tmp_path):
    (tmp_path / "keys").write_text("sesame\n")
    headers = {"authorization": "Bearer sesame", "host": "pool-0.pool.svc:8080"}
    async with served(api_keys_file=tmp_path / "keys") as s:
        assert (await s.http.get("/v1/models", headers=headers)).status_code == 200
    async with served(api_keys_file=tmp_path / "keys", http_hosts="pool") as s:
        assert (await s.http.get("/v1/models", headers=headers)).status_code == 421


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
@pytest.mark.parametrize("path", ["/v1/models/switch", "/requests/x/cancel", "/v1/completions", "/v1/chat/completions"])
async def test_what_a_page_of_another_site_may_send_unasked_is_refused(served, kind, path):
    async with served(dev_mode=True) as s:
        headers, body = {"content-type": kind}, json.dumps({"model": "qwen"})
        answer = await s.http.post(path, content=body, headers=headers)
        assert answer.status_code in {400, 415}
        assert "application/json" in answer.json()["error"]["message"]
        told = await s.http.post(path, content=body, headers={**headers, "origin": "https://evil.example"})
        assert told.status_code == (403 if "completions" not in path else answer.status_code)
        assert s.engine.active == "llama"


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/audio/translations", "/v1/calls/x/cancel"])
async def test_a_page_of_another_site_can_t_send_what_needs_no_question_first(served, path):
    async with served() as s:
        form = {"data": {"model": "llama"}, "files": {"file": b"sound"}}
        foreign = await s.http.post(path, **form, headers={"origin": "https://evil.example"})
        assert foreign.status_code == 403
        own = await s.http.post(path, **form, headers={"origin": s.server.address})
        assert own.status_code != 403
    async with served(cors_origins="*") as s:
        assert (await s.http.post(path, **form, headers={"origin": "https://evil.example"})).status_code != 403


@pytest.mark.parametrize("origin", ["http://[", "http://[::1", "null", "\\", "http://a]b"])
async def test_an_origin_that_is_none_is_another_site(served, origin):
    async with served() as s:
        told = await s.http.post("/v1/models/switch", json={"model": "qwen"}, headers={"origin": origin})
        assert (told.status_code, told.json()["error"]["type"]) == (403, "PermissionDeniedError")


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches", "/v1/batches/x/cancel"])
async def test_a_page_of_another_site_leaves_no_files_and_batches_behind(served, path):
    async with served() as s:
        for kind in ("text/plain", "multipart/form-data; boundary=x"):
            headers = {"content-type": kind, "origin": "https://evil.example"}
            assert (await s.http.post(path, content=b"{}", headers=headers)).status_code == 403
        own = await s.http.post(path, json={}, headers={"origin": s.server.address})
        assert "need a broker" in own.json()["error"]["message"]
    async with served(cors_origins="*") as s:
        allowed = await s.http.post(path, json={}, headers={"origin": "https://evil.example"})
        assert "need a broker" in allowed.json()["error"]["message"]


async def test_a_batch_is_asked_for_with_json(served):
    async with served() as s:
        answer = await s.http.post("/v1/batches", content=b"{}", headers={"content-type": "text/plain"})
        assert answer.status_code == 415
        assert "application/json" in answer.json()["error"]["message"]


async def test_recordings_come_as_forms_and_nothing_else_does(served):
    async with served() as s:
        form = {"data": {"model": "llama"}, "files": {"file": b"sound"}}
        refused = await s.http.post("/v1/embeddings", **form)
        assert (refused.status_code, "application/json" in refused.text) == (400, True)
        taken = await s.http.post("/v1/audio/transcriptions", **form)
        assert "does not support" in taken.json()["error"]["message"]  # the fake engine's own words


@pytest.mark.parametrize("line", ["k tenant=a,tenant=b", "k tenant=", "k tenant=" + "x" * 257])
def test_a_key_has_one_tenant_that_has_a_name(tmp_path, line):
    (keys := tmp_path / "keys").write_text(f"other\n{line}\n")
    with pytest.raises(ConfigError, match="line 2: a key has one tenant"):
        read_keys(keys)


def test_keys_of_one_tenant_have_one_owner_and_other_keys_have_each_their_own(tmp_path):
    (path := tmp_path / "keys").write_text("a tenant=acme\nb look,tenant=acme\nc\nd\n")
    owners = [holder.owner for holder in read_keys(path).values()]
    assert (owners[0] == owners[1], len(set(owners))) == (True, 3)
    assert "acme" in owners[0]


@pytest.mark.parametrize("tenant", ["Größe", "東京"])
async def test_a_key_s_tenant_may_be_of_any_language(served, tmp_path, tenant):
    (path := tmp_path / "keys").write_text(f"sesame ask,tenant={tenant}\n", encoding="utf-8")
    async with served(api_keys_file=path) as s:
        body = {"model": "llama", "prompt": "x", "max_tokens": 1}
        answer = await s.http.post("/v1/completions", json=body, headers={"authorization": "Bearer sesame"})
        assert answer.status_code == 200, answer.text
