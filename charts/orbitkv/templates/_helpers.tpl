{{/* Labels of every object. Call with (list . "component"). */}}
{{- define "orbitkv.labels" -}}
{{- $root := index . 0 -}}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/part-of: orbitkv
app.kubernetes.io/name: orbitkv
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* What selects the operator's pods. Without the release's name: selectors cannot change, and another release may take over. */}}
{{- define "orbitkv.operator.selector" -}}
app.kubernetes.io/name: orbitkv
app.kubernetes.io/component: operator
{{- end }}

{{/* What selects the webhook's pods. */}}
{{- define "orbitkv.webhook.selector" -}}
app.kubernetes.io/name: orbitkv
app.kubernetes.io/component: webhook
{{- end }}

{{/* What selects the CSI driver's pods. */}}
{{- define "orbitkv.csi.selector" -}}
app.kubernetes.io/name: orbitkv
app.kubernetes.io/component: csi
{{- end }}

{{/* Not empty where the CSI driver runs. Also without injection: pods that were made with it may still be there. */}}
{{- define "orbitkv.csi.runs" -}}
{{- if or .Values.injection.csi.enabled (and .Values.injection.enabled (eq .Values.injection.socketVolume "csi")) }}yes{{ end -}}
{{- end }}

{{/* The full name of an image. Call with (list . .Values.images.NAME). */}}
{{- define "orbitkv.image" -}}
{{- $root := index . 0 -}}
{{- $image := index . 1 -}}
{{- $name := printf "%s/%s" ($image.registry | default $root.Values.images.registry) $image.repository | trimPrefix "/" -}}
{{- if $image.digest -}}
{{ $name }}@{{ $image.digest }}
{{- else -}}
{{ $name }}:{{ $image.tag | default $root.Chart.AppVersion }}
{{- end -}}
{{- end }}

{{/* The names of Secrets, separated by commas. Call with a list of `name: ...`. */}}
{{- define "orbitkv.secrets" -}}
{{- $names := list -}}
{{- range . }}{{ $names = append $names .name }}{{ end -}}
{{ join "," $names }}
{{- end }}

{{/* Names by which agents reach the report server; the first is the one that they check. */}}
{{- define "orbitkv.reports.names" -}}
- orbitkv-reports.{{ .Release.Namespace }}.svc
- orbitkv-reports.{{ .Release.Namespace }}.svc.cluster.local
{{- end }}

{{/* What the webhooks of the configuration have in common. */}}
{{- define "orbitkv.webhook.common" -}}
admissionReviewVersions: [v1]
clientConfig:
  service:
    name: orbitkv-webhook
    namespace: {{ .Release.Namespace }}
    path: /mutate
    port: 443
failurePolicy: Ignore
matchPolicy: Equivalent
sideEffects: None
timeoutSeconds: 2
{{- end }}

{{/* Every namespace but those that the cluster and OrbitKV themselves run in. */}}
{{- define "orbitkv.webhook.elsewhere" -}}
- {key: kubernetes.io/metadata.name, operator: NotIn, values: [kube-system, {{ .Release.Namespace }}]}
{{- end }}
