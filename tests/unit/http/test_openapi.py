"""What the server says can be asked: all of it, and nothing that is not there."""

from pathlib import Path
from typing import Any

import pytest

from schemas.requests import Endpoint
from tests.support.engine_spec import references
from tests.support.fake_engine import DESCRIBED


async def document(http: Any, **more: Any) -> dict[str, Any]:
    answer = await http.get("/openapi.json", **more)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize("dev_mode", [True, False])
async def test_every_route_is_described_and_each_reference_leads_somewhere(served, dev_mode) -> None:
    async with served(dev_mode=dev_mode) as serving:
        found = await document(serving.http)
        models = {endpoint.value for endpoint in DESCRIBED}
        there = {route.path_format for route in serving.server._routes}
        elsewhere = {endpoint.value for endpoint in Endpoint} | {"/v1/score", "/v1/rerank", "/v2/rerank"}
        assert found["paths"].keys() == there - (elsewhere - models)
        assert ("/v1/models/switch" in found["paths"]) == dev_mode
        operations = [operation for path in found["paths"].values() for operation in path.values()]
        assert all(operation["summary"] and operation["responses"] for operation in operations)
        ids = [operation["operationId"] for operation in operations if "operationId" in operation]
        assert len(ids) == len(set(ids))
        schemas = found["components"]["schemas"]
        assert references(found) <= {f"#/components/schemas/{name}" for name in schemas}
        assert "model" in schemas["SwitchBody"]["properties"]


async def test_a_parameter_of_a_path_is_one_and_a_body_has_its_schema(served) -> None:
    async with served(dev_mode=True) as serving:
        paths = (await document(serving.http))["paths"]
        (name,) = paths["/v1/models/{name}"]["get"]["parameters"]
        assert (name["name"], name["in"], name["required"]) == ("name", "path", True)
        body = paths["/v1/load_lora_adapter"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body == {"$ref": "#/components/schemas/LoadLora"}
        assert "model" in {each["name"] for each in paths["/sleep"]["post"]["parameters"]}


async def test_where_keys_are_asked_for_any_of_them_is_good_for_the_document(served, tmp_path: Path) -> None:
    (keys := tmp_path / "keys").write_text("asks ask\nlooks look\n")
    async with served(api_keys_file=keys, key="asks") as serving:
        for key in ("asks", "looks"):
            found = await document(serving.http, headers={"authorization": f"Bearer {key}"})
            assert found["security"] == [{"key": []}, {"x-api-key": []}]
            assert found["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
        answer = await serving.http.get("/openapi.json", headers={"authorization": "Bearer nobody"})
        assert answer.status_code == 401
        page = await serving.http.get("/docs", headers={"authorization": ""})
        assert page.status_code == 200
        assert "default-src 'none'" in page.headers["content-security-policy"]
