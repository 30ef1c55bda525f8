"""What deploy/ has for containers and Kubernetes, held against its ecosystem's own tools, where they are.

``deploy/local/checkers`` builds them; a test whose tool is missing is skipped and says so.
"""

import json
import os
import re
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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
    "secretFiles.sasl_password_file.secret": "pool-user",
    "secretFiles.sasl_password_file.key": "user.password",
    "secretFiles.ssl_cafile.secret": "kafka-cluster-ca-cert",
    "secretFiles.ssl_cafile.key": "ca.crt",
    "secretFiles.control_key_file.secret": "pool-user",
    "secretFiles.control_key_file.key": "control.key",
    "secretFiles.api_keys_file.secret": "api-keys",
    "secretFiles.api_keys_file.key": "keys",
    "serviceAccount.name": "asks-nothing",
    "settings.max_wait_s": "30",
}
TLS = {
    f"secretFiles.http_ssl_{file}.{part}": value
    for file in ("certfile", "keyfile")
    for part, value in (("secret", "door"), ("key", f"tls.{file}"))
}
MODELS = """
models:
  volume: {persistentVolumeClaim: {claimName: models, readOnly: true}}
  config:
    default_model: llama
    models:
      llama: {model: /models/llama-3.1-8b-instruct, max_model_len: 8192}
      qwen: {model: /models/qwen3-8b}
"""
"""What the chart does not do without."""
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


def template(*chosen: object, models: str = MODELS) -> str:
    kubernetes = ("--namespace", "models", "--kube-version", "1.34.0")
    return run(tool("helm"), "template", "pool", CHART, *kubernetes, "--values", "-", *chosen, input=models)


def rendered(**values: str) -> str:
    return template(*(word for name, value in values.items() for word in ("--set", f"{name}={value}")))


def of_file(tmp_path: Path, values: str, *, models: str = MODELS) -> dict[str, Any]:
    """As an operator's own file has it: numbers and lists come differently from ``--set``."""
    (file := tmp_path / "values.yaml").write_text(values)
    return kinds(template("--values", file, models=models))


def kinds(text: str) -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all(text) if each}


@pytest.fixture(scope="module")
def chart() -> dict[str, Any]:
    return kinds(rendered(**ALL))


@pytest.mark.parametrize("values", [{}, ALL], ids=["with models only", "with all"])
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
    run(tool("helm"), "lint", "--strict", "--quiet", CHART, "--values", "-", input=MODELS)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"replica": "2"}, "replica"),
        ({"kafka.securityProtocol": "TLS"}, "securityProtocol"),
        ({"kafka.securityProtocol": "SASL_SSL"}, "sasl_password_file"),
        ({"kafka.securityProtocol": "SASL_SSL", "settings.oauth_token_file": "/token"}, "kafka.username"),
        ({"secretFiles.password.secret": "x", "secretFiles.password.key": "y"}, "secretFiles"),
        ({"secretFiles.http_ssl_certfile.secret": "x", "secretFiles.http_ssl_certfile.key": "y"}, "http_ssl_keyfile"),
        ({"image.digest": "latest"}, "digest"),
        ({"settings.shutdown_timeout_s": "600"}, "shutdownTimeoutS"),
        ({"settings.group_id": "other"}, "kafka.groupId"),
        ({"settings.http_port": "9000"}, "8080"),
        ({"settings.http_ssl_keyfile": "/tls/key"}, "http_ssl_certfile"),
        ({**TLS, "settings.http_ssl_certfile": "/tls/crt"}, "secretFiles"),
        ({"models.volume.hostPath.path": "/srv/models"}, "/models/volume"),
        ({"podDisruptionBudget.minAvailable": "2", "podDisruptionBudget.maxUnavailable": "1"}, "/podDisruptionBudget"),
    ],
)
def test_wrong_values_are_refused_by_name(values, complaint):
    chosen = [word for name, value in values.items() for word in ("--set", f"{name}={value}")]
    done = subprocess.run(
        [tool("helm"), "template", "pool", CHART, "--kube-version", "1.34.0", "--values", "-", *chosen],
        input=MODELS,
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


@pytest.mark.parametrize(
    "values", [TLS, {"settings.http_ssl_certfile": "/tls/crt", "settings.http_ssl_keyfile": "/tls/key"}]
)
def test_probes_and_prometheus_speak_https_where_the_server_does_however_that_was_said(values):
    found = kinds(rendered(**{"monitoring.podMonitor": "true"}, **values))
    (worker,) = found["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    probes = [worker[name]["httpGet"]["scheme"] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
    (endpoint,) = found["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert (probes, endpoint["scheme"]) == (["HTTPS"] * 3, "https")


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
    assert str(found.kafka.sasl_password_file) == "/etc/gearshift-secrets/sasl_password_file"
    assert str(found.worker.control_key_file) == "/etc/gearshift-secrets/control_key_file"
    assert (found.worker.worker_id, found.worker.max_wait_s) == ("pool-0", 30.0)
    assert not [value for name, value in given.items() if name.endswith("PASSWORD")]


def test_a_pod_answers_others_with_a_secret_s_keys_or_where_that_is_said(chart, monkeypatch):
    """As it comes it starts, and answers probes and metrics only."""

    def http(found: dict[str, Any]) -> settings.HttpSettings:
        with monkeypatch.context() as patch:
            for name, value in environment(found).items():
                patch.setenv(name, value)
            return settings.load().http

    assert str(http(chart).api_keys_file) == "/etc/gearshift-secrets/api_keys_file"
    assert not is_locked(http(chart))
    pod = chart["StatefulSet"]["spec"]["template"]["spec"]
    (secrets,) = [volume["projected"] for volume in pod["volumes"] if volume["name"] == "secrets"]
    keys = {"secret": {"name": "api-keys", "items": [{"key": "keys", "path": "api_keys_file"}]}}
    assert (secrets["defaultMode"], len(secrets["sources"])) == (0o440, 4)
    assert keys in secrets["sources"]
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
    assert topics == ["requests", "calls", "throttled", "requests.llama", "requests.qwen"]
    assert "replicas" not in chart["StatefulSet"]["spec"]


def test_the_network_policy_lets_out_names_broker_and_traces_only(chart):
    policy = chart["NetworkPolicy"]["spec"]
    assert {port["port"] for rule in policy["egress"] for port in rule["ports"]} == {53, *range(9092, 9099), 4318}
    assert [port["port"] for rule in policy["ingress"] for port in rule["ports"]] == ["http"]


def test_the_network_policy_lets_out_what_else_is_said(tmp_path):
    found = of_file(tmp_path, "networkPolicy: {egress: [{ports: [{port: 443, protocol: TCP}]}]}")
    assert found["NetworkPolicy"]["spec"]["egress"][-1] == {"ports": [{"port": 443, "protocol": "TCP"}]}


@pytest.mark.parametrize(("least", "alarming"), [("0", False), ("1", True)])
def test_a_pool_that_may_be_scaled_to_nothing_is_no_alarm(least, alarming):
    (group,) = kinds(rendered(**ALL, **{"autoscaling.minReplicas": least}))["PrometheusRule"]["spec"]["groups"]
    assert ("GearshiftNoWorkers" in {rule["alert"] for rule in group["rules"]}) is alarming


def test_the_chart_s_rules_are_the_file_s_of_this_release_s_pods_only(tmp_path):
    ours = 'namespace="models",pod=~"pool-[0-9]+"'
    rendered_rules = kinds(rendered(**ALL, **{"monitoring.runbook": "https://wiki/runbook"}))["PrometheusRule"]["spec"]
    (group,), (source,) = rendered_rules["groups"], rules()["groups"]
    for rule, written in zip(group["rules"], source["rules"], strict=True):
        assert rule["annotations"].pop("runbook_url") == f"https://wiki/runbook#{rule['alert'].lower()}"
        assert rule["expr"].count(ours) == len(
            re.findall(r"gearshift_[a-z_]+|\bup\b|process_start_time", written["expr"])
        )
        bare = rule["expr"].replace(f"{{{ours}}}", "").replace(f"{ours},", "")
        assert {**rule, "expr": bare} == written
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rendered_rules))
    assert "SUCCESS" in run(tool("promtool"), "check", "rules", "--lint-fatal", tmp_path / "rules.yaml")


def test_the_chart_s_dashboard_is_the_file():
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


def test_objectives_that_nothing_met_or_nothing_missed_have_a_line():
    """Of a counter there is no series before it has counted."""
    ((query,),) = (
        [t["expr"] for t in panel["targets"]]
        for panel in dashboard.dashboard()["panels"]
        if panel["title"] == "Objectives met, share of requests"
    )
    missed, all_of_them = (
        f"sum by (model, class) (rate(gearshift_objectives_total{{{which}}}[$__rate_interval]))"
        for which in ('instance=~"$worker",met="false"', 'instance=~"$worker"')
    )
    assert query == f"1 - ({missed} or 0 * {all_of_them}) / {all_of_them}"


def test_the_rules_pass_promtool():
    assert "SUCCESS" in run(tool("promtool"), "check", "rules", "--lint-fatal", CHART / "files/alerts.yaml")


# --- the image -----------------------------------------------------------------------------------------------------


def image() -> str:
    """The Dockerfile, each instruction on a line."""
    return (ROOT / "Dockerfile").read_text().replace("\\\n", " ")


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_a_container_s_health_is_asked_at_the_port_that_its_variable_says(status, code) -> None:
    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    (check,) = re.findall(r"HEALTHCHECK.*?CMD (\[.*\])", image())
    with ThreadingHTTPServer(("127.0.0.1", 0), Health) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = str(server.server_address[1])
        done = subprocess.run(json.loads(check), env={**os.environ, "GEARSHIFT_HTTP_PORT": port}, check=False)
        server.shutdown()
    assert done.returncode == code


def test_a_container_listens_where_the_image_says_and_downloads_to_a_place_of_its_own() -> None:
    (exposed_port,) = re.findall(r"^EXPOSE (\d+)", image(), re.MULTILINE)
    assert f"GEARSHIFT_HTTP_PORT={exposed_port}" in image()
    (hub,) = re.findall(r"HF_HOME=(\S+)", image())
    assert f"install --directory --owner gearshift {hub}" in image()
    assert f"hub:{hub}" in yaml.safe_load(COMPOSE.read_text())["services"]["worker"]["volumes"]
    assert "HF_HUB_OFFLINE=1 " not in image().partition("FROM")[2]


def test_in_kubernetes_no_hub_is_asked_unless_that_is_said(tmp_path) -> None:
    assert environment(kinds(rendered()))["HF_HUB_OFFLINE"] == "1"
    said = of_file(tmp_path, 'env: [{name: HF_HUB_OFFLINE, value: "0"}]')
    names = [each["name"] for each in said["StatefulSet"]["spec"]["template"]["spec"]["containers"][0]["env"]]
    assert names.count("HF_HUB_OFFLINE") == 1
    assert environment(said)["HF_HUB_OFFLINE"] == "0"


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


def test_in_compose_broker_and_worker_are_started_again() -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    assert {services[name].get("restart") for name in ("broker", "worker")} == {"unless-stopped"}


def test_in_compose_the_broker_writes_to_its_volume_and_compiled_kernels_can_be_loaded() -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    volume, _, folder = services["broker"]["volumes"][0].partition(":")
    assert volume == "broker"
    assert services["broker"]["environment"]["KAFKA_LOG_DIRS"] == folder
    worker = services["worker"]
    assert worker["read_only"]
    mounts = {path: options.split(",") for path, _, options in (line.partition(":") for line in worker["tmpfs"])}
    assert mounts.keys() == {"/tmp", "/home/gearshift"}
    assert all("exec" in options for options in mounts.values())  # a container's tmpfs is noexec by itself


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


SETTINGS = """
settings:
  device_memory_bytes: 68719476736
  reply_topics: [replies, "answers.*"]
  tenant_weights: {gold: 3, tin: 0.5}
  max_wait_s: 2.5
  http_anonymous: true
"""


def test_settings_arrive_as_they_were_written_whatever_their_size_and_kind(tmp_path, monkeypatch) -> None:
    for name, value in environment(of_file(tmp_path, SETTINGS)).items():
        monkeypatch.setenv(name, value)
    found = settings.load()
    assert found.engine.device_memory_bytes == 64 << 30
    assert found.topics.reply_topics == ("replies", "answers.*")
    assert found.worker.tenant_weights == {"gold": 3.0, "tin": 0.5}
    assert (found.worker.max_wait_s, found.http.http_anonymous) == (2.5, True)


def test_large_numbers_of_models_arrive_too(tmp_path) -> None:
    text = "models: {config: {default_model: a, models: {a: {model: /models/a, kv_cache_memory_bytes: 68719476736}}}}"
    (tmp_path / "models.yaml").write_text(of_file(tmp_path, text)["ConfigMap"]["data"]["models.yaml"])
    keys = {"model", "max_model_len", "kv_cache_memory_bytes"}
    found = load_models(tmp_path / "models.yaml", GROUPS["engine"](), engine_keys=keys, frontend_keys=set())
    assert found.models["a"].engine_args["kv_cache_memory_bytes"] == 64 << 30


OWN = """
models:
  volume: {hostPath: {path: /srv/models}}
  config: {models: {mine: {model: /models/mine}}}
podDisruptionBudget: {minAvailable: 2}
"""


def test_what_an_operator_says_stands_alone(tmp_path) -> None:
    """Helm merges maps: an example among the chart's own values would be an operator's model, too."""
    chart = of_file(tmp_path, OWN, models="")
    assert list(yaml.safe_load(chart["ConfigMap"]["data"]["models.yaml"])["models"]) == ["mine"]
    volumes = chart["StatefulSet"]["spec"]["template"]["spec"]["volumes"]
    (models,) = [each for each in volumes if each["name"] == "models"]
    assert models == {"name": "models", "hostPath": {"path": "/srv/models"}}
    assert chart["PodDisruptionBudget"]["spec"].keys() == {"minAvailable", "selector"}


@pytest.mark.parametrize("missing", ["volume", "config"])
def test_models_and_where_they_are_must_be_said(tmp_path, missing) -> None:
    said = yaml.safe_load(MODELS)
    del said["models"][missing]
    with pytest.raises(AssertionError, match=f"/models/{missing}"):
        of_file(tmp_path, yaml.safe_dump(said), models="")


def test_one_pod_at_a_time_may_be_missed_unless_it_is_said_otherwise(tmp_path) -> None:
    budget = of_file(tmp_path, "podDisruptionBudget: {unhealthyPodEvictionPolicy: AlwaysAllow}")["PodDisruptionBudget"]
    assert (budget["spec"]["maxUnavailable"], budget["spec"]["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")


MORE = f"""
image: {{digest: "sha256:{"a" * 64}"}}
runtimeClassName: habana
hostIPC: true
priorityClassName: serving
podLabels: {{team: search}}
podAnnotations: {{a/b: c}}
serviceAccount: {{name: pool-identity, annotations: {{eks.amazonaws.com/role-arn: "arn:aws:iam::1:role/pool"}}}}
runAs: {{user: 2000, group: null, fsGroup: 3000}}
env: [{{name: PT_HPU_LAZY_MODE, value: "1"}}, {{name: NODE, valueFrom: {{fieldRef: {{fieldPath: spec.nodeName}}}}}}]
envFrom: [{{configMapRef: {{name: nccl}}}}]
volumes: [{{name: tokens, emptyDir: {{}}}}]
volumeMounts: [{{name: tokens, mountPath: /tokens, readOnly: true}}]
initContainers: [{{name: fetch, image: fetch, command: [fetch]}}]
sidecars: [{{name: iam, image: iam, volumeMounts: [{{name: tokens, mountPath: /tokens}}]}}]
kafka: {{securityProtocol: SASL_SSL, saslMechanism: OAUTHBEARER}}
settings: {{oauth_token_file: /tokens/token, oauth_extensions: {{logicalCluster: lkc-1}}}}
secretFiles:
  http_ssl_certfile: {{secret: tls, key: tls.crt}}
  http_ssl_keyfile: {{secret: tls, key: tls.key}}
monitoring: {{podMonitor: true}}
"""


def test_a_pod_has_what_its_cluster_and_its_broker_ask_for(tmp_path, monkeypatch) -> None:
    chart = of_file(tmp_path, MORE)
    template = chart["StatefulSet"]["spec"]["template"]
    pod = template["spec"]
    worker, sidecar = pod["containers"]
    assert worker["image"] == f"gearshift@sha256:{'a' * 64}"
    assert (pod["runtimeClassName"], pod["hostIPC"], pod["priorityClassName"]) == ("habana", True, "serving")
    assert (template["metadata"]["labels"]["team"], template["metadata"]["annotations"]["a/b"]) == ("search", "c")
    identity = chart["ServiceAccount"]["metadata"]
    assert pod["serviceAccountName"] == identity["name"] == "pool-identity"
    assert list(identity["annotations"]) == ["eks.amazonaws.com/role-arn"]
    ids = {name: value for name, value in pod["securityContext"].items() if name.endswith(("User", "Group"))}
    assert ids == {"runAsUser": 2000, "fsGroup": 3000}
    assert ("PT_HPU_LAZY_MODE", "1") in {(each["name"], each.get("value")) for each in worker["env"]}
    assert worker["envFrom"] == [{"configMapRef": {"name": "nccl"}}]
    assert {"name": "tokens", "emptyDir": {}} in pod["volumes"]
    assert "/tokens" in {mount["mountPath"] for mount in worker["volumeMounts"]}
    assert (pod["initContainers"][0]["name"], sidecar["name"]) == ("fetch", "iam")
    probes = [worker[name]["httpGet"]["scheme"] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert probes == ["HTTPS"] * 3
    assert chart["PodMonitor"]["spec"]["podMetricsEndpoints"][0]["scheme"] == "https"
    for each in worker["env"]:
        if "value" in each:
            monkeypatch.setenv(each["name"], each["value"])
    found = settings.load()
    assert (str(found.kafka.oauth_token_file), found.kafka.oauth_extensions) == (
        "/tokens/token",
        {"logicalCluster": "lkc-1"},
    )
    assert found.http.http_ssl_keyfile is not None


def test_a_release_counts_its_own_pods_and_not_those_of_one_whose_name_goes_on() -> None:
    (tokens,) = [
        each["metadata"]["query"]
        for each in kinds(rendered(**ALL))["ScaledObject"]["spec"]["triggers"]
        if each["type"] == "prometheus"
    ]
    (pattern,) = set(re.findall(r'pod=~"([^"]+)"', tokens))
    assert re.fullmatch(pattern, "pool-12")
    assert not re.fullmatch(pattern, "pool-b-0")


def test_whether_a_new_models_file_restarts_the_pods_is_the_operator_s_choice(tmp_path) -> None:
    def annotations(values: str) -> dict[str, str]:
        found = of_file(tmp_path, values)["StatefulSet"]["spec"]["template"]["metadata"]["annotations"]
        return found or {}

    kept = annotations("models: {restartOnChange: false}")
    changed = annotations("models: {config: {default_model: qwen}}")
    assert kept == annotations("models: {restartOnChange: false, config: {default_model: qwen}}") == {}
    assert changed != annotations("")
