"""What deploy/ has for containers and Kubernetes, held against its ecosystem's own tools, where they are.

``deploy/local/checkers`` builds them; a test whose tool is missing is skipped and says so.
"""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.kubernetes import dashboard
from deploy.local.setup import home
from schemas.status import Presence
from service import settings
from service.http.security import is_locked
from service.models_file import load_models
from service.settings import GROUPS
from service.worker.metrics import Metrics, Standing

ROOT = Path(__file__).parents[3]
CHART = ROOT / "deploy/kubernetes/gearshift"
COMPOSE = ROOT / "deploy/compose/compose.yaml"
ALL = {
    "autoscaling.enabled": "true",
    "monitoring.podMonitor": "true",
    "monitoring.rules": "true",
    "monitoring.dashboard": "true",
    "kafka.securityProtocol": "SASL_SSL",
    "kafka.saslMechanism": "SCRAM-SHA-512",
    "kafka.username": "worker",
    "kafka.secret.name": "kafka",
    "kafka.secret.keys": "{password,ca.crt,control.key}",
    "http.keysSecret.name": "api-keys",
    "settings.max_wait_s": "30",
}
OPERATORS = "ScaledObject,PodMonitor,PrometheusRule"
"""Kinds whose schemas Kubernetes does not have; they are looked at here."""


def tool(name: str) -> Path:
    found = home() / "checkers" / name
    if not found.exists():
        pytest.skip(f"{name} is not here; deploy/local/checkers builds it")
    return found


def run(*command: object, **more: Any) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rendered(**values: str) -> str:
    chosen = [word for name, value in values.items() for word in ("--set", f"{name}={value}")]
    return run(tool("helm"), "template", "pool", CHART, "--namespace", "models", "--kube-version", "1.34.0", *chosen)


def kinds(text: str) -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all(text) if each}


@pytest.fixture(scope="module")
def chart() -> dict[str, Any]:
    return kinds(rendered(**ALL))


@pytest.mark.parametrize("values", [{}, ALL], ids=["as it comes", "with all"])
def test_the_chart_is_good_kubernetes(values, tmp_path):
    text = rendered(**values)
    (tmp_path / "all.yaml").write_text(text)
    schemas = f"{tool('schemas')}/{{{{ .ResourceKind }}}}{{{{ .KindSuffix }}}}.json"
    said = run(
        *(tool("kubeconform"), "-strict", "-output", "json", "-summary", "-skip", OPERATORS),
        *("-schema-location", schemas, tmp_path / "all.yaml"),
    )
    summary = json.loads(said)["summary"]
    assert (summary["invalid"], summary["errors"]) == (0, 0)
    assert summary["valid"] >= 6


def test_the_chart_passes_helm_lint():
    run(tool("helm"), "lint", "--strict", "--quiet", CHART)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"replica": "2"}, "replica"),
        ({"kafka.securityProtocol": "TLS"}, "securityProtocol"),
        ({"kafka.securityProtocol": "SASL_SSL"}, "kafka.secret.name"),
        ({"kafka.securityProtocol": "SASL_SSL", "kafka.secret.name": "x"}, "kafka.username"),
    ],
)
def test_wrong_values_are_refused_by_name(values, complaint):
    chosen = [word for name, value in values.items() for word in ("--set", f"{name}={value}")]
    done = subprocess.run(
        [tool("helm"), "template", "pool", CHART, "--kube-version", "1.34.0", *chosen],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert complaint in done.stderr


def test_a_pod_has_longer_to_end_than_its_requests_have_to_finish(chart):
    pod = chart["StatefulSet"]["spec"]["template"]["spec"]
    drain = float(environment(chart)["GEARSHIFT_SHUTDOWN_TIMEOUT_S"])
    assert pod["terminationGracePeriodSeconds"] >= drain + 30


def test_a_pod_has_no_rights_that_it_does_not_need(chart):
    pod = chart["StatefulSet"]["spec"]["template"]["spec"]
    (worker,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not pod["automountServiceAccountToken"]
    assert worker["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    written = {mount["mountPath"] for mount in worker["volumeMounts"] if not mount.get("readOnly")}
    assert written == {"/dev/shm", "/tmp", "/home/gearshift"}
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}} in pod["volumes"]


def test_a_pod_gets_its_gaudi(chart):
    (worker,) = chart["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    assert worker["resources"]["limits"]["habana.ai/gaudi"] == worker["resources"]["requests"]["habana.ai/gaudi"] == 1
    assert worker["resources"]["requests"]["cpu"] == "8"


def environment(chart: dict[str, Any]) -> dict[str, str]:
    (worker,) = chart["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    return {each["name"]: each.get("value", "pool-0") for each in worker["env"]}


def test_a_worker_takes_the_settings_that_the_chart_gives_it(chart, monkeypatch):
    given = environment(chart)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    found = settings.load()
    assert found.kafka.security_protocol == "SASL_SSL"
    assert str(found.kafka.sasl_password_file) == "/etc/gearshift-secret/password"
    assert str(found.worker.control_key_file) == "/etc/gearshift-secret/control.key"
    assert (found.worker.worker_id, found.worker.max_wait_s) == ("pool-0", 30.0)
    assert not [value for name, value in given.items() if name.endswith("PASSWORD")]


def test_a_pod_answers_others_with_a_secret_s_keys_or_where_that_is_said(chart, monkeypatch):
    """As it comes it starts, and answers probes and metrics only."""

    def http(found: dict[str, Any]) -> settings.HttpSettings:
        with monkeypatch.context() as patch:
            for name, value in environment(found).items():
                patch.setenv(name, value)
            return settings.load().http

    assert str(http(chart).api_keys_file) == "/etc/gearshift-keys/keys"
    assert not is_locked(http(chart))
    pod = chart["StatefulSet"]["spec"]["template"]["spec"]
    assert {"name": "keys", "secret": {"secretName": "api-keys", "defaultMode": 0o440}} in pod["volumes"]
    assert is_locked(http(kinds(rendered())))
    assert not is_locked(http(kinds(rendered(**{"http.anonymous": "true"}))))


def test_the_chart_s_models_are_a_models_file(chart, tmp_path):
    file = tmp_path / "models.yaml"
    file.write_text(chart["ConfigMap"]["data"].get("models.yaml") or rendered_models())
    engine = {"model", "max_model_len"}
    assert list(load_models(file, GROUPS["engine"](), engine_keys=engine, frontend_keys=set()).models) == [
        "llama",
        "qwen",
    ]


def rendered_models() -> str:
    """ALL has a second ConfigMap, for Grafana."""
    return next(
        each["data"]["models.yaml"] for each in yaml.safe_load_all(rendered()) if each and each["kind"] == "ConfigMap"
    )


def test_scaling_counts_tokens_and_every_topic_of_requests(chart):
    triggers = chart["ScaledObject"]["spec"]["triggers"]
    (tokens,) = [each["metadata"]["query"] for each in triggers if each["type"] == "prometheus"]
    assert names(tokens) == {"gearshift_queue_tokens", "gearshift_lag_tokens"} <= exposed()
    topics = [each["metadata"]["topic"] for each in triggers if each["type"] == "kafka"]
    assert topics == ["requests", "requests.llama", "requests.qwen"]
    assert "replicas" not in chart["StatefulSet"]["spec"]


def test_the_network_policy_lets_out_names_broker_and_traces_only(chart):
    policy = chart["NetworkPolicy"]["spec"]
    assert {port["port"] for rule in policy["egress"] for port in rule["ports"]} == {53, 9092, 9093, 4318}
    assert [port["port"] for rule in policy["ingress"] for port in rule["ports"]] == ["http"]


def test_the_chart_s_rules_and_dashboard_are_the_files(chart):
    assert chart["PrometheusRule"]["spec"] == rules()
    (boards,) = [e for e in yaml.safe_load_all(rendered(**ALL)) if e and e["metadata"]["name"] == "pool-dashboard"]
    assert json.loads(boards["data"]["gearshift.json"]) == dashboard.dashboard()


# --- rules and dashboard --------------------------------------------------------------------------------------------


def rules() -> dict[str, Any]:
    return yaml.safe_load((CHART / "files/alerts.yaml").read_text())


def names(query: str) -> set[str]:
    return set(re.findall(r"gearshift_[a-z_]+", query))


def exposed() -> set[str]:
    """Every series that a worker shows, by name."""
    metrics = Metrics()
    presence = Presence(worker="w", pool="p", at=0.0, interval_s=1.0)
    metrics.watch(lambda: Standing(presence, 0, {}, 0.0, 0.0, 0.0))
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
    return {
        family.name + suffix
        for family in metrics.registry.collect()
        if family.name.startswith("gearshift_")
        for suffix in suffixes[family.type]
    }


def test_alerts_ask_for_series_that_there_are():
    alerts = [rule for group in rules()["groups"] for rule in group["rules"]]
    assert len(alerts) == len({alert["alert"] for alert in alerts}) >= 10
    assert set().union(*(names(alert["expr"]) for alert in alerts)) <= exposed()
    assert all(alert["annotations"]["summary"] and alert["labels"]["severity"] for alert in alerts)


def test_the_dashboard_is_current_and_asks_for_series_that_there_are():
    assert dashboard.FILE.read_text() == dashboard.text(), "python -m deploy.kubernetes.dashboard --write"
    queries = [t["expr"] for panel in dashboard.dashboard()["panels"] for t in panel.get("targets", ())]
    assert len(queries) > 20
    assert set().union(*map(names, queries)) <= exposed()


def test_the_dashboard_s_queries_are_promql(tmp_path):
    queries = [t["expr"] for panel in dashboard.dashboard()["panels"] for t in panel.get("targets", ())]
    recorded = [
        {"record": f"panel:{number}", "expr": query.replace("$__rate_interval", "1m")}
        for number, query in enumerate(queries)
    ]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": recorded}]}))
    run(tool("promtool"), "check", "rules", tmp_path / "rules.yaml")


def test_the_rules_pass_promtool():
    assert "SUCCESS" in run(tool("promtool"), "check", "rules", "--lint-fatal", CHART / "files/alerts.yaml")


# --- compose --------------------------------------------------------------------------------------------------------


def test_the_compose_file_is_one():
    services = json.loads(run(tool("compose"), "-format", "json", COMPOSE, cwd=COMPOSE.parent))["services"]
    assert services.keys() == {"broker", "worker", "prometheus", "grafana"}


def test_what_the_compose_file_mounts_is_there_and_what_it_sets_is_a_setting():
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    mounts = [volume.split(":")[0] for service in services.values() for volume in service.get("volumes", ())]
    files = [COMPOSE.parent / path for path in mounts if path.startswith(".")]
    assert len(files) == 5
    assert all(file.is_file() for file in files)
    known = {f"GEARSHIFT_{name.upper()}" for group in GROUPS.values() for name in group.model_fields}
    worker = services["worker"]
    assert {name for name in worker["environment"] if name.startswith("GEARSHIFT_")} <= known
    assert (
        int(worker["stop_grace_period"].rstrip("s"))
        >= float(worker["environment"]["GEARSHIFT_SHUTDOWN_TIMEOUT_S"]) + 30
    )


def test_prometheus_configuration_passes_promtool(tmp_path):
    config = yaml.safe_load((COMPOSE.parent / "prometheus.yaml").read_text())
    config["rule_files"] = [str(CHART / "files/alerts.yaml")]
    (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(config))
    run(tool("promtool"), "check", "config", tmp_path / "prometheus.yaml")


def test_a_load_may_take_as_long_as_the_start_does_unless_a_setting_says_otherwise() -> None:
    assert environment(kinds(rendered(startupTimeoutS="3600")))["GEARSHIFT_LOAD_TIMEOUT_S"] == "3600"
    said = rendered(**{"startupTimeoutS": "3600", "settings.load_timeout_s": "60"})
    assert said.count("GEARSHIFT_LOAD_TIMEOUT_S") == 1
    assert environment(kinds(said))["GEARSHIFT_LOAD_TIMEOUT_S"] == "60"


def test_on_gaudi_the_compilers_recipes_are_kept_and_elsewhere_there_are_none() -> None:
    name = "PT_HPU_RECIPE_CACHE_CONFIG"
    assert environment(kinds(rendered()))[name] == "/tmp/recipes,false,8192"
    assert name not in environment(kinds(rendered(**{"device.recipeCacheMb": "0"})))
    assert name not in environment(kinds(rendered(**{"device.resource": "nvidia.com/gpu"})))
