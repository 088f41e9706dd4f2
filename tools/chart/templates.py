"""Makes the chart's templates that follow from code: the operator's roles and the CustomResourceDefinitions."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import yaml

from orbitkv_crds.schema import crds
from orbitkv_operator.rights import (
    CLUSTER_RULES,
    NAMESPACE_RULES,
    WEBHOOK_CLUSTER_RULES,
    WEBHOOK_NAMESPACE_RULES,
    Rule,
)

LABELS = '{{- include "orbitkv.labels" (list . "%s") | nindent 4 }}'
ROLES_HEAD = """\
# Made by `make generate` from operator/orbitkv_operator/rights.py: change it there.
"""
BINDING = """\
apiVersion: rbac.authorization.k8s.io/v1
kind: {kind}Binding
metadata:
  name: {name}
{namespace}  labels:
    {labels}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: {kind}
  name: {name}
subjects:
  - kind: ServiceAccount
    name: {name}
    namespace: {{{{ .Release.Namespace }}}}
"""
ROLE = """\
apiVersion: rbac.authorization.k8s.io/v1
kind: {kind}
metadata:
  name: {name}
{namespace}  labels:
    {labels}
rules:
{rules}"""
NAMESPACE = "  namespace: {{ .Release.Namespace }}\n"


def operator_roles() -> str:
    """Return the roles of the operator and their bindings."""
    return ROLES_HEAD + _roles("operator", CLUSTER_RULES, NAMESPACE_RULES)


def webhook_roles() -> str:
    """Return the roles of the webhook and their bindings."""
    roles = _roles("webhook", WEBHOOK_CLUSTER_RULES, WEBHOOK_NAMESPACE_RULES)
    return f"{ROLES_HEAD}{{{{- if .Values.injection.enabled }}}}\n{roles}{{{{- end }}}}\n"


def _roles(component: str, in_cluster: Sequence[Rule], in_namespace: Sequence[Rule]) -> str:
    parts = []
    for kind, namespace, rules in (("ClusterRole", "", in_cluster), ("Role", NAMESPACE, in_namespace)):
        words = {"kind": kind, "namespace": namespace, "labels": LABELS % component, "name": f"orbitkv-{component}"}
        parts += [ROLE.format(rules=_rules(rules), **words), BINDING.format(**words)]
    return "---\n".join(parts)


def _rules(rules: Sequence[Rule]) -> str:
    text = _yaml([rule.as_policy_rule() for rule in rules])
    return "".join(f"  {line}\n" for line in text.splitlines())


def crd_templates() -> dict[str, Callable[[], str]]:
    """Return what makes each CustomResourceDefinition's template, by path."""
    return {
        f"charts/orbitkv/templates/crds/{crd['spec']['names']['plural']}.yaml": partial(crd_template, crd)
        for crd in crds()
    }


def crd_template(crd: Mapping[str, Any]) -> str:
    """Return a CustomResourceDefinition as a template: it stays when the chart goes, and has the chart's labels.

    Helm would take braces in its descriptions for instructions, so they are escaped.
    """
    metadata = {**crd["metadata"], "annotations": dict(crd["metadata"].get("annotations", {}))}
    metadata["annotations"]["helm.sh/resource-policy"] = "keep"
    body = _yaml({**crd, "metadata": metadata}).replace("{{", '{{ "{{" }}')
    head, found, rest = body.partition("metadata:\n")
    assert found, "a CustomResourceDefinition has metadata"
    return (
        "# Made by `make generate` from crds/orbitkv_crds: change it there.\n"
        "{{- if .Values.crds.install }}\n"
        f"{head}{found}  labels:\n    {LABELS % 'crds'}\n{rest}"
        "{{- end }}\n"
    )


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=120)
