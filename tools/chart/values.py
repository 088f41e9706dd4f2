"""The values of the chart `charts/orbitkv`: the one place where their names, defaults and meanings are written.

`tools.chart.files` makes `values.yaml`, `values.schema.json` and the table in the documentation from these models.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

Digest = Annotated[str, Field(pattern=r"^(sha256:[0-9a-f]{64})?$")]
Registry = Annotated[str, Field(pattern=r"^([^\s/].*[^\s/]|[^\s/])?$")]
Tag = Annotated[str, Field(pattern=r"^([A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?$")]
Object = dict[str, Any]
"""Passed on to Kubernetes as it is, which checks it."""


class Part(BaseModel):
    """A mapping whose keys are all known: a key that is not is refused by its name."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", alias_generator=to_camel)


class SecretName(Part):
    """A Secret of the release namespace."""

    name: str = Field(min_length=1)


class Image(Part):
    """Where one image is."""

    registry: Registry = Field(
        default="", description="Its registry, with a path if there is one. Empty: `images.registry`."
    )
    repository: str = Field(pattern=r"^[a-z0-9]+([._/-]+[a-z0-9]+)*$", description="Its name in the registry.")
    tag: Tag = Field(default="", description="Its tag. Empty: the version of the chart's application.")
    digest: Digest = Field(default="", description="Its digest (`sha256:...`); if given, the tag means nothing.")


class OperatorImage(Image):
    """The image of the operator."""

    repository: str = Field(
        default="orbitkv/operator", pattern=r"^[a-z0-9]+([._/-]+[a-z0-9]+)*$", description="Its name in the registry."
    )


class AgentImage(Image):
    """The image of the node agents."""

    repository: str = Field(
        default="orbitkv/node-agent", pattern=r"^[a-z0-9]+([._/-]+[a-z0-9]+)*$", description="Its name in the registry."
    )


class PayloadImage(Image):
    """The image of the payload."""

    repository: str = Field(
        default="orbitkv/engine-plugin",
        pattern=r"^[a-z0-9]+([._/-]+[a-z0-9]+)*$",
        description="Its name in the registry.",
    )


class Images(Part):
    """Where the images are."""

    registry: Registry = Field(
        default="localhost",
        description="Registry of all images, with a path if there is one. No images are published: `make images` makes "
        "them as `localhost/orbitkv/...`, and with this default they have to be on the nodes already. With "
        "`REGISTRY=...` it pushes them to a registry of yours, which is to be named here.",
    )
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field(
        default="IfNotPresent", description="When the operator's image is pulled."
    )
    pull_secrets: list[SecretName] = Field(
        default=[], description="Secrets of the release namespace for pulling images, as `- name: ...`."
    )
    operator: OperatorImage = Field(default=OperatorImage(), description="The operator's image.")
    agent: AgentImage = Field(
        default=AgentImage(), description="The node agents' image, for pools that do not name one themselves."
    )


class Resources(Part):
    """Requests and limits of a container."""

    requests: Object = Field(default={"cpu": "50m", "memory": "128Mi"}, description="What the scheduler sets aside.")
    limits: Object = Field(default={"memory": "512Mi"}, description="What it may take at most.")


class Operator(Part):
    """The operator's Deployment."""

    replicas: int = Field(
        default=2, ge=0, le=5, description="Pods of the operator. One acts; another takes over if it goes."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="What the operator logs."
    )
    resources: Resources = Field(default=Resources(), description="Requests and limits of the operator's pods.")
    priority_class_name: str = Field(default="", description="Priority class of the operator's pods.")
    node_selector: dict[str, str] = Field(default={}, description="Nodes that the operator may run on.")
    tolerations: list[Object] = Field(default=[], description="Taints that the operator's pods tolerate.")
    affinity: Object = Field(default={}, description="Affinity of the operator's pods.")
    pod_annotations: dict[str, str] = Field(default={}, description="Further annotations of the operator's pods.")
    pod_labels: dict[str, str] = Field(default={}, description="Further labels of the operator's pods.")
    env: list[Object] = Field(
        default=[],
        description="Further environment variables of the operator, as in a container's `env`: its times, for example "
        "(docs/configuration.md).",
    )


class Payload(Part):
    """What engines load, and how it gets into their pods."""

    image: PayloadImage = Field(default=PayloadImage(), description="The image with the files.")
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field(
        default="IfNotPresent", description="When nodes pull it."
    )
    pull_secrets: list[SecretName] = Field(
        default=[],
        description="Secrets for pulling it, as `- name: ...`. They are added to engines' pods, so they have to exist "
        "in the namespaces of these.",
    )
    mode: Literal["init", "imageVolume"] = Field(
        default="init",
        description="`init`: an init container copies the files. `imageVolume`: the image is a volume of the pod; used "
        "where the apiserver keeps such volumes (the feature gate ImageVolume), and nodes have to serve them too. "
        "Elsewhere it is `init` all the same, and pods say so.",
    )


class CSIResources(Part):
    """Requests and limits of the CSI driver's pods."""

    requests: Object = Field(default={"cpu": "5m", "memory": "48Mi"}, description="What the scheduler sets aside.")
    limits: Object = Field(default={"memory": "128Mi"}, description="What it may take at most.")


class CSI(Part):
    """The CSI driver `csi.orbitkv.io`."""

    enabled: bool = Field(
        default=False,
        description="Run the driver also with `socketVolume: hostPath`. Pods that were made with `csi` need it until "
        "they are gone: set this first when you go back.",
    )
    kubelet_directory: str = Field(
        default="/var/lib/kubelet",
        pattern=r"^/.*[^/]$",
        description="The kubelet's own folder on the nodes (its `--root-dir`).",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="What it logs.")
    resources: CSIResources = Field(default=CSIResources(), description="Requests and limits of its pods.")
    priority_class_name: str = Field(
        default="", description="Priority class of its pods. Empty: that of the agents, if the chart makes it."
    )
    node_selector: dict[str, str] = Field(
        default={"kubernetes.io/os": "linux"},
        description="Nodes that it runs on: all that an injected pod may come to. Elsewhere such a pod waits.",
    )
    tolerations: list[Object] = Field(default=[{"operator": "Exists"}], description="Taints that its pods tolerate.")


class Injection(Part):
    """What annotated pods get."""

    enabled: bool = Field(
        default=True,
        description="Run the webhook that gives annotated pods what their engines need. Without it engines are set up "
        "by hand.",
    )
    payload: Payload = Field(default=Payload(), description="What engines load, and how it gets into their pods.")
    pod_security_default: Literal["privileged", "baseline", "restricted"] = Field(
        default="privileged",
        description="What Pod Security enforces in namespaces without a label, if your cluster has such a default. "
        "Where it forbids hostPath volumes, pods start without the cache, with that reason.",
    )
    socket_volume: Literal["hostPath", "csi"] = Field(
        default="hostPath",
        description="How engines' pods get the folder of the agent's socket. `hostPath`: they mount it themselves, "
        "which Pod Security forbids in namespaces that enforce `baseline` or `restricted`. `csi`: a CSI driver, which "
        "the chart then runs on every node, mounts it for them, which Pod Security allows. A pod on a node without the "
        "driver waits for it (docs/injection.md).",
    )
    csi: CSI = Field(default=CSI(), description="The CSI driver.")


class Webhook(Part):
    """The webhook's Deployment."""

    replicas: int = Field(default=2, ge=0, le=20, description="Pods of the webhook; all of them serve.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="What it logs.")
    resources: Resources = Field(default=Resources(), description="Requests and limits of its pods.")
    priority_class_name: str = Field(default="", description="Priority class of its pods.")
    node_selector: dict[str, str] = Field(default={}, description="Nodes that it may run on.")
    tolerations: list[Object] = Field(default=[], description="Taints that its pods tolerate.")
    affinity: Object = Field(default={}, description="Affinity of its pods.")
    pod_annotations: dict[str, str] = Field(default={}, description="Further annotations of its pods.")
    pod_labels: dict[str, str] = Field(default={}, description="Further labels of its pods.")


class Compat(Part):
    """For those who come from elsewhere."""

    lmcache: bool = Field(
        default=False,
        description="Serve pods that are labelled `lmcache.ai/lmcache-inject` for LMCache's operator: its annotation "
        "`lmcache.ai/lmcache-engine` is read as the name of a CacheNamespace. Turn LMCache's own injection off first.",
    )


class AgentPriority(Part):
    """The PriorityClass `orbitkv-agent`."""

    create: bool = Field(
        default=True,
        description="Make the PriorityClass `orbitkv-agent`, which pools use by default. It preempts nothing; it keeps "
        "agents from being the first that a full node evicts.",
    )
    value: int = Field(default=1_000_000, ge=-(2**31), le=1_000_000_000, description="Its priority.")


class IssuerRef(Part):
    """An issuer of cert-manager."""

    name: str = Field(
        default="",
        description="An issuer of yours. Empty: an issuer of its own, which signs with a CA that only OrbitKV uses.",
    )
    kind: Literal["Issuer", "ClusterIssuer"] = Field(default="Issuer", description="Its kind.")


class Certificates(Part):
    """The certificates of the server that agents send their reports to, and of the webhook."""

    provider: Literal["self-managed", "cert-manager"] = Field(
        default="self-managed",
        description="Who makes and renews the certificates of the server that agents report to and of the webhook. "
        "`self-managed`: the operator. `cert-manager`: the chart makes Certificates, and cert-manager has to be there.",
    )
    issuer: IssuerRef = Field(default=IssuerRef(), description="With cert-manager: who signs.")


class CRDs(Part):
    """The CustomResourceDefinitions."""

    install: bool = Field(
        default=True,
        description="Install and upgrade the CustomResourceDefinitions with the chart. They, and all pools and cache "
        "namespaces, stay when the chart is uninstalled.",
    )


class RBAC(Part):
    """Roles for people."""

    aggregate: bool = Field(
        default=True,
        description="Let the cluster's roles `admin` and `edit` manage CacheNamespaces, and `view` read them and "
        "ManagerPools.",
    )


class NetworkPolicy(Part):
    """NetworkPolicies of operator, webhook and agents."""

    enabled: bool = Field(
        default=True,
        description="Restrict who may open connections to operator, webhook and agents. Needs a network that enforces "
        "it.",
    )
    metrics_from: list[Object] = Field(
        default=[],
        description="Who may read metrics: peers as in the `from` of a NetworkPolicy. Empty: every pod; a token is "
        "needed in any case.",
    )


class ServiceMonitor(Part):
    """The ServiceMonitor of operator and webhook."""

    enabled: bool = Field(
        default=False, description="Make a ServiceMonitor for operator and webhook (needs the Prometheus Operator)."
    )
    interval: str = Field(default="30s", pattern=r"^([0-9]+(ms|s|m|h))+$", description="How often it is read.")


class Rules(Part):
    """The alert rules."""

    enabled: bool = Field(
        default=False, description="Make a PrometheusRule with alerts (needs the Prometheus Operator)."
    )


class Dashboard(Part):
    """The Grafana dashboard."""

    enabled: bool = Field(default=False, description="Make a ConfigMap with a dashboard for Grafana's sidecar.")
    labels: dict[str, str] = Field(default={"grafana_dashboard": "1"}, description="Labels that the sidecar looks for.")


class Monitoring(Part):
    """Prometheus and Grafana."""

    reader: bool = Field(
        default=True,
        description="Make the ServiceAccount `orbitkv-metrics-reader`, which may read metrics and nothing else, and a "
        "Secret of that name with a token for it. ServiceMonitor and PodMonitors refer to it.",
    )
    labels: dict[str, str] = Field(
        default={}, description="Labels that your Prometheus selects ServiceMonitors and rules by."
    )
    service_monitor: ServiceMonitor = Field(default=ServiceMonitor(), description="Metrics of operator and webhook.")
    rules: Rules = Field(default=Rules(), description="Alerts.")
    dashboard: Dashboard = Field(default=Dashboard(), description="A dashboard.")


class OpenShift(Part):
    """What only OpenShift has."""

    scc: bool = Field(
        default=False,
        description="Make the SecurityContextConstraints `orbitkv` for the service accounts of the release namespace.",
    )


class DeletionGuard(Part):
    """The policy that keeps pools in use."""

    enabled: bool = Field(
        default=True,
        description="Refuse to delete a ManagerPool that CacheNamespaces refer to, unless it is annotated with "
        '`orbitkv.io/confirm-delete: "true"`.',
    )


class Values(Part):
    """All values of the chart."""

    images: Images = Field(default=Images(), description="Where the images are.")
    operator: Operator = Field(default=Operator(), description="The operator's Deployment.")
    injection: Injection = Field(default=Injection(), description="What annotated pods get.")
    webhook: Webhook = Field(default=Webhook(), description="The webhook's Deployment.")
    compat: Compat = Field(default=Compat(), description="For those who come from elsewhere.")
    agent_priority: AgentPriority = Field(default=AgentPriority(), description="The agents' PriorityClass.")
    certificates: Certificates = Field(default=Certificates(), description="Certificates of the servers.")
    crds: CRDs = Field(default=CRDs(), description="CustomResourceDefinitions.")
    deletion_guard: DeletionGuard = Field(default=DeletionGuard(), description="Protection of pools in use.")
    rbac: RBAC = Field(default=RBAC(), description="Roles for people.")
    network_policy: NetworkPolicy = Field(default=NetworkPolicy(), description="NetworkPolicies.")
    monitoring: Monitoring = Field(default=Monitoring(), description="Prometheus and Grafana.")
    openshift: OpenShift = Field(default=OpenShift(), description="OpenShift.")


class ValuesFile(Values):
    """What Helm hands to a chart: its values, and those that a parent chart gives to all."""

    global_: Object = Field(default={}, alias="global", description="Set by a parent chart; not used.")
