{{/*
The name that the names of all objects begin with. It contains "kvdiag": alerts find their targets by that word. A Service's
name has no dots and begins with a letter, a release's may differ.
*/}}
{{- define "kvdiag.fullname" -}}
{{- $release := .Release.Name | replace "." "-" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if not (regexMatch "^[a-z]" $release) -}}
{{- printf "kvdiag-%s" ($release | trunc 46 | trimSuffix "-") -}}
{{- else if contains "kvdiag" $release -}}
{{- $release -}}
{{- else -}}
{{- printf "%s-kvdiag" ($release | trunc 46 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}

{{- define "kvdiag.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/name: kvdiag
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "kvdiag.nodeSelectorLabels" -}}
app.kubernetes.io/name: kvdiag
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: node
{{- end -}}

{{- define "kvdiag.fleetSelectorLabels" -}}
app.kubernetes.io/name: kvdiag
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: fleet
{{- end -}}

{{- define "kvdiag.image" -}}
{{- with .Values.image -}}
{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}{{ with .digest }}@{{ . }}{{ end }}
{{- end -}}
{{- end -}}

{{/* What a monitor does with a node's target, whichever its kind. */}}
{{- define "kvdiag.nodeEndpoint" -}}
- port: kvdiag
  path: /metrics
  interval: {{ .Values.monitors.interval }}
  relabelings:
    # A node's kvdiag is identified by its node, since its pods are replaced.
    - sourceLabels: [__meta_kubernetes_pod_node_name]
      targetLabel: node
    # It monitors no server: KvdiagServerNeverSeen ignores it.
    - targetLabel: kvdiag_scope
      replacement: node
{{- end -}}
